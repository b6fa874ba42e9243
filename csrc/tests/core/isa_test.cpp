// The CPU backend is compiled once per instruction set; every copy must give the same bits
// (contract C3).
#include "cpu/isa.hpp"

#include <algorithm>
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

// A processor has an instruction set with every extension that its copies are compiled for, even if
// it lacks others.
void test_choice() {
  using polyspec::cpu::Extensions;
  using Sets = std::vector<Isa>;
  const Sets all{Isa::kBaseline, Isa::kDotprod,    Isa::kAvx2,       Isa::kAvxVnni,
                 Isa::kAvx512,   Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};
  const auto with = [&](const Extensions& there) {
    Sets found;
    for (const Isa isa : all) {
      if (polyspec::cpu::has(there, isa)) found.push_back(isa);
    }
    return found;
  };
  const Extensions every{true, true, true, true, true, true, true, true, true, true, true, true};
  // Instruction sets that a processor without the extension lacks.
  const auto lost = [&](bool Extensions::* extension) {
    Extensions some = every;
    some.*extension = false;
    const Sets left = with(some);
    Sets found;
    std::set_difference(all.begin(), all.end(), left.begin(), left.end(),
                        std::back_inserter(found));
    return found;
  };
  CHECK(with(every) == all);
  CHECK(with({}) == Sets{Isa::kBaseline});
  CHECK(lost(&Extensions::dotprod) == Sets{Isa::kDotprod});
  for (const auto extension : {&Extensions::avx2, &Extensions::fma, &Extensions::f16c})
    CHECK(lost(extension) == Sets(all.begin() + 2, all.end()));
  CHECK(lost(&Extensions::avxvnni) == Sets{Isa::kAvxVnni});
  for (const auto extension :
       {&Extensions::avx512f, &Extensions::avx512dq, &Extensions::avx512bw, &Extensions::avx512vl})
    CHECK(lost(extension) == Sets(all.begin() + 4, all.end()));
  CHECK(lost(&Extensions::avx512vnni) == Sets(all.begin() + 5, all.end()));
  CHECK(lost(&Extensions::avx512bf16) == Sets(all.begin() + 6, all.end()));
  CHECK(lost(&Extensions::amx) == Sets{Isa::kAmx});
}

// Skylake has AVX512 and not AVX-VNNI, which comes before it.
void test_copies() {
  const int copies[] = {0, 1, 2, 3};
  const polyspec::cpu::Copy<int> list[] = {{Isa::kBaseline, copies},
                                           {Isa::kAvx2, copies + 1},
                                           {Isa::kAvxVnni, copies + 2},
                                           {Isa::kAvx512Vnni, copies + 3}};
  const auto skylake = [](Isa isa) { return isa <= Isa::kAvx512 && isa != Isa::kAvxVnni; };
  CHECK_EQ(1, polyspec::cpu::chosen(list, skylake));
  CHECK_EQ(2, polyspec::cpu::chosen(list, [](Isa isa) { return isa <= Isa::kAvx512; }));
  CHECK_EQ(3, polyspec::cpu::chosen(list, [](Isa) { return true; }));
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
  test_copies();
  for (const auto& copy : polyspec::cpu::kRowsCopies) {
    if (copy.isa == Isa::kBaseline) continue;
    if (polyspec::cpu::has(polyspec::cpu::extensions(), copy.isa)) others.push_back(copy.table);
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
