// Resources of captured calls until their graph is gone: slices are lent again once they are
// returned, and outside of a capture a release is refused.
#include "polyspec/capture.hpp"

#include <set>
#include <thread>
#include <vector>

#include "../../bindings/slices.hpp"
#include "support/check.hpp"

namespace {

using bindings::Slices;

void test_slices_come_back() {
  constexpr int64_t kCount = 5;
  constexpr int64_t kBytes = 16;
  char memory[kCount * kBytes];
  Slices slices(memory, kCount, kBytes);
  for (int round = 0; round < 3; ++round) {  // more loans in all than there are slices
    std::set<char*> lent;
    for (int64_t i = 0; i < kCount; ++i) lent.insert(static_cast<char*>(slices.lend()));
    CHECK_EQ(size_t{kCount}, lent.size());
    for (char* const slice : lent) {
      CHECK(slice >= memory);
      CHECK(slice + kBytes <= memory + sizeof(memory));
      CHECK_EQ(0, (slice - memory) % kBytes);
    }
    CHECK(slices.lend() == nullptr);
    for (char* const slice : lent) slices.give_back(slice);
  }
}

// Graphs are destroyed by any thread.
void test_threads() {
  char memory[4];
  Slices slices(memory, 4, 1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&slices] {
      for (int repeat = 0; repeat < 1000; ++repeat) {
        char* const mine = static_cast<char*>(slices.lend());
        CHECK(mine != nullptr);
        *mine = 1;  // no other call has it
        slices.give_back(mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_nothing_is_promised_without_a_graph() {
  using Code = polyspec::Result::Code;
  int calls = 0;
  const auto release = [](void* argument) { ++*static_cast<int*>(argument); };
  const polyspec::Stream cpu = polyspec::Stream::cpu();
  CHECK(polyspec::when_graph_goes(cpu, release, &calls).code == Code::kInvalidArgument);
  CHECK(polyspec::when_graph_goes(polyspec::Stream::on(nullptr), nullptr, &calls).code ==
        Code::kInvalidArgument);
  CHECK(!polyspec::when_graph_goes(polyspec::Stream::on(nullptr), release, &calls).ok());
  CHECK_EQ(0, calls);
}

}  // namespace

int main() {
  test_slices_come_back();
  test_threads();
  test_nothing_is_promised_without_a_graph();
  return 0;
}
