// The CPU backend's loops (vectors, narrowed selects, rows shared among threads) against the plain
// row algorithms on one thread, over vocabularies large enough for all of them.
//
//   cpu_rows_test [cases]    another number of cases than CTest runs
#define POLYSPEC_CORE core_plain

#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/sample_request.hpp"
#include "core/verify_request.hpp"
#include "cpu/serial_group.hpp"
#include "support/check.hpp"
#include "support/random_verify.hpp"

namespace {

using namespace polyspec::core_plain;
using polyspec::DType;
using polyspec::Executor;
using polyspec::Stream;

// A separate type: the overloads for SerialGroup do not accept it.
class OneThread : public SerialGroup {
 public:
  using SerialGroup::SerialGroup;
};

// It walks from token to token; the shared code takes a team of several lanes.
template <class Weight>
int64_t team_pick(OneThread&, int64_t, const Weight& weight, uint64_t target) {
  int64_t i = 0;
  for (uint64_t mass; target >= (mass = weight(i)); ++i) target -= mass;
  return i;
}

// f(an element type of this dtype).
template <class F>
void with_dtype(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) f(float{});
  if (dtype == DType::kBFloat16) f(BFloat16{});
  if (dtype == DType::kFloat16) f(Float16{});
}

void request(OneThread& group, const polyspec::SampleParams& params, int64_t b) {
  with_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    if (params.allowed == nullptr) return sample_request<T>(group, params, b);
    sample_request<Masked<T>>(group, params, b);
  });
}
void request(OneThread& group, const polyspec::VerifyParams& params, int64_t b) {
  with_dtype(params.target_dtype, [&](auto element) {
    using T = decltype(element);
    if (params.allowed == nullptr) return verify_request<T>(group, params, b);
    verify_request<Masked<T>>(group, params, b);
  });
}

void run_backwards(void* calls, int64_t n, Executor::Body body, void* context) {
  ++*static_cast<int64_t*>(calls);
  for (int64_t i = n - 1; i >= 0; --i) body(context, i);
}

void run_on_threads(void* calls, int64_t n, Executor::Body body, void* context) {
  ++*static_cast<int64_t*>(calls);
  constexpr int64_t kThreads = 3;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([=] {
      for (int64_t i = t; i < n; i += kThreads) body(context, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

polyspec::Result on_cpu(const polyspec::SampleParams& params, const Stream& stream) {
  return polyspec::sample(params, stream);
}
polyspec::Result on_cpu(const polyspec::VerifyParams& params, const Stream& stream) {
  return polyspec::verify(params, stream);
}

// Returns how often the executors were called.
template <class Case>
int64_t test(uint64_t seed, int64_t vocab, const std::string& kind) {
  const Case call(seed, vocab);
  const std::string name =
      kind + " case " + std::to_string(seed) + ", vocabulary " + std::to_string(call.vocab);
  std::vector<unsigned char> expected = call.outputs.bytes;
  const auto params = call.params(call.inputs.bytes.data(), expected.data());
  Scratch scratch;
  std::memset(&scratch, 0xa5, sizeof scratch);
  OneThread group(scratch);
  for (int64_t b = 0; b < params.batch; ++b) request(group, params, b);

  int64_t calls = 0;
  const Executor executors[] = {{}, {run_backwards, &calls}, {run_on_threads, &calls}};
  const char* const names[] = {", alone", ", backwards", ", on threads"};
  for (int i = 0; i < 3; ++i) {
    std::vector<unsigned char> got = call.outputs.bytes;
    CHECK(
        on_cpu(call.params(call.inputs.bytes.data(), got.data()), Stream::cpu(executors[i])).ok());
    cases::check_same(expected, got, name + names[i]);
  }
  return calls;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 60;
  // One tile more and less than where rows are cut up; more than 2^20: tiles of 2048.
  static const int64_t kVocabs[] = {16385, 28672, 28673, 32767, 40000, 131073};
  int64_t calls = 0;
  for (uint64_t seed = 0; seed < count; ++seed) {
    const int64_t vocab = kVocabs[seed % (sizeof kVocabs / sizeof kVocabs[0])];
    calls += test<cases::SampleCase>(seed, vocab, "sample");
    calls += test<cases::VerifyCase>(seed, vocab, "verify");
  }
  calls += test<cases::SampleCase>(1, 1050000, "sample");
  calls += test<cases::VerifyCase>(2, 1050000, "verify");
  CHECK(calls > 0);  // rows were cut up
  // The small vocabularies of the other tests, where everything is the odd end of a loop.
  for (uint64_t seed = 0; seed < 4 * count; ++seed) {
    test<cases::SampleCase>(seed, 0, "sample");
    test<cases::VerifyCase>(seed, 0, "verify");
  }
  return 0;
}
