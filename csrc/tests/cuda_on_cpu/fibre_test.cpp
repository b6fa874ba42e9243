// The row algorithms over a group of fibres against the CPU backend, in groups of several shapes
// and in several orders of execution. Leaving out any one barrier of the algorithms makes this
// fail.
//
//   fibre_test [cases]    another number of cases than CTest runs
#define POLYSPEC_CORE core_fibre
#define POLYSPEC_FN inline

#include <cstdlib>
#include <cstring>

#include "cuda_on_cpu/fibre/compare.hpp"
#include "cuda_on_cpu/fibre/fibre_group.hpp"

namespace {

using namespace polyspec::core_fibre;

struct Shape {
  int size, lanes;
};

template <class Case>
void test(uint64_t seed, int64_t forced_vocab, const std::string& kind) {
  static const Shape kShapes[] = {{1, 1},   {2, 1},  {4, 4},   {32, 32},
                                  {64, 32}, {64, 4}, {96, 32}, {96, 1}};
  const Expected<Case> expected(seed, forced_vocab, kind);
  cases::Random random(seed);
  for (const fibre::Order order : fibre::kOrders) {
    const Shape shape = random.one_of(kShapes);
    fibre::Machine machine(shape.size, shape.lanes, order, seed);
    Scratch scratch;
    std::memset(&scratch, 0xa5, sizeof scratch);
    expected.check(machine, [&](int rank) { return FibreGroup(machine, scratch, rank); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  for (uint64_t seed = 0; seed < count; ++seed) {
    test<cases::SampleCase>(seed, 0, "sample");
    test<cases::VerifyCase>(seed, 0, "verify");
    test<cases::IndexedVerifyCase>(seed, 0, "indexed verify");
    test<cases::TreeCase>(seed, 0, "verify_tree");
    test<cases::IndexedTreeCase>(seed, 0, "indexed verify_tree");
  }
  // More than 2^20 tokens: tiles of 2048.
  test<cases::SampleCase>(1, 1050000, "sample");
  test<cases::VerifyCase>(2, 1050000, "verify");
  return 0;
}
