// The CPU backend is compiled once per instruction set; every copy must give the same bits
// (contract C3).
#include "cpu/isa.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "cpu/rows.hpp"
#include "support/check.hpp"
#include "support/random_verify.hpp"

namespace {

using polyspec::cpu::Isa;
using polyspec::cpu::Rows;

#ifdef __x86_64__
static_assert(std::size(polyspec::cpu::kRowsCopies) > 1, "else this would pass by skipping");
#endif

void run(const Rows& rows, const polyspec::SampleParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) rows.sample_request(params, b, nullptr);
}
void run(const Rows& rows, const polyspec::VerifyParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) rows.verify_request(params, b, nullptr);
}
void run(const Rows& rows, const polyspec::VerifyTreeParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) rows.tree_request(params, b, nullptr);
}

// An instruction set is taken only with every extension that its copies are compiled for.
void test_choice() {
  using polyspec::cpu::Extensions;
  const Extensions all{true, true, true, true, true, true, true, true, true, true};
  const auto without = [&](bool Extensions::* extension) {
    Extensions some = all;
    some.*extension = false;
    return polyspec::cpu::widest(some);
  };
  CHECK(polyspec::cpu::widest(all) == Isa::kAmx);
  CHECK(polyspec::cpu::widest({}) == Isa::kBaseline);
  CHECK(without(&Extensions::amx) == Isa::kAvx512Bf16);
  CHECK(without(&Extensions::avx512bf16) == Isa::kAvx512Vnni);
  CHECK(without(&Extensions::avx512vnni) == Isa::kAvx512);
  for (const auto extension :
       {&Extensions::avx512f, &Extensions::avx512dq, &Extensions::avx512bw, &Extensions::avx512vl})
    CHECK(without(extension) == Isa::kAvx2);
  for (const auto extension : {&Extensions::avx2, &Extensions::fma, &Extensions::f16c})
    CHECK(without(extension) == Isa::kBaseline);
}

template <class Case>
void compare(uint64_t seed, const Rows& other, const std::string& kind) {
  const Case call(seed);
  std::vector<unsigned char> expected = call.outputs.bytes;
  std::vector<unsigned char> got = call.outputs.bytes;
  run(polyspec::cpu::kRowsBaseline, call.params(call.inputs.bytes.data(), expected.data()));
  run(other, call.params(call.inputs.bytes.data(), got.data()));
  cases::check_same(expected, got,
                    kind + " case " + std::to_string(seed) + ", baseline against " + other.isa);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  std::vector<const Rows*> others;
  CHECK_EQ(std::string("baseline"), polyspec::cpu::kRowsBaseline.isa);
  test_choice();
  for (const auto& copy : polyspec::cpu::kRowsCopies) {
    if (copy.isa == Isa::kBaseline) continue;
    if (copy.isa <= polyspec::cpu::widest(polyspec::cpu::extensions()))
      others.push_back(copy.table);
  }
  if (others.empty()) {
    std::printf("this processor runs the baseline only: nothing to compare\n");
    return 77;
  }
  for (const Rows* other : others) {
    for (uint64_t seed = 0; seed < count; ++seed) {
      compare<cases::SampleCase>(seed, *other, "sample");
      compare<cases::VerifyCase>(seed, *other, "verify");
      compare<cases::TreeCase>(seed, *other, "verify_tree");
    }
    std::printf("baseline and %s agree\n", other->isa);
  }
  return 0;
}
