// POLYSPEC_CPU_ISA: an unknown name is an error of every operator with copies, and the error lists
// the known names; no other set is used instead.
#include <cstdlib>
#include <cstring>

#include "cpu/isa.hpp"
#include "polyspec/attention.hpp"
#include "polyspec/dense.hpp"
#include "polyspec/int4.hpp"
#include "polyspec/layer.hpp"
#include "polyspec/verify_tree.hpp"
#include "support/aligned.hpp"
#include "support/check.hpp"

namespace {

using polyspec::Result;
using polyspec::cpu::Isa;

void check_refused(const Result& result) {
  CHECK(result.code == Result::Code::kInvalidArgument);
  CHECK_EQ(std::string("POLYSPEC_CPU_ISA: expected baseline, dotprod, avx2, avxvnni, avx512, "
                       "avx512vnni, avx512bf16, amx or nothing, given 'avx3'"),
           std::string(result.message));
}

void test_names() {
  Isa isa = Isa::kBaseline;
  CHECK(polyspec::cpu::parse_isa(nullptr, &isa) && isa == Isa::kAmx);
  CHECK(polyspec::cpu::parse_isa("baseline", &isa) && isa == Isa::kBaseline);
  CHECK(polyspec::cpu::parse_isa("", &isa) && isa == Isa::kAmx);
  CHECK(polyspec::cpu::parse_isa("avx512", &isa) && isa == Isa::kAvx512);
  CHECK(polyspec::cpu::parse_isa("avxvnni", &isa) && isa == Isa::kAvxVnni);
  for (const char* const name : {"AVX2", "avx", "avx2 ", "sse4", "neon", "avx512bf"}) {
    isa = Isa::kAvx512;
    CHECK(!polyspec::cpu::parse_isa(name, &isa));
    CHECK(isa == Isa::kAvx512);
  }
}

void test_operators() {
  float logits[2] = {0.0f, 1.0f}, logprob[2];
  int64_t token[2] = {-7, -7}, accepted = -7, row = -7;
  int32_t status = -7;
  polyspec::SampleParams sample;
  sample.batch = 1;
  sample.vocab = 2;
  sample.logits = logits;
  sample.tokens = token;
  sample.logprobs = logprob;
  sample.status = &status;
  check_refused(polyspec::sample(sample));

  polyspec::VerifyParams verify;
  verify.batch = 1;
  verify.vocab = 2;
  verify.target_logits = logits;
  verify.tokens = token;
  verify.num_accepted = &accepted;
  verify.logprobs = logprob;
  verify.status = &status;
  check_refused(polyspec::verify(verify));

  polyspec::VerifyTreeParams tree;
  tree.batch = 1;
  tree.vocab = 2;
  tree.target_logits = logits;
  tree.tokens = token;
  tree.num_accepted = &accepted;
  tree.rows = &row;
  tree.logprobs = logprob;
  tree.status = &status;
  check_refused(polyspec::verify_tree(tree));
  CHECK_EQ(int64_t{-7}, token[0]);
  CHECK_EQ(int32_t{-7}, status);

  const support::Aligned packed = support::aligned(4096), workspace = support::aligned(4096);
  float x[32] = {}, y[1] = {-7.0f};
  polyspec::DenseProductParams dense;
  dense.shape = {1, 32, polyspec::DType::kFloat32};
  dense.tokens = 1;
  dense.x = x;
  dense.packed = packed.get();
  dense.y = y;
  dense.workspace = workspace.get();
  check_refused(polyspec::dense_product(dense));

  polyspec::Int4ProductParams int4;
  int4.shape = {1, 32, 32, polyspec::DType::kFloat32};
  int4.tokens = 1;
  int4.x = x;
  int4.packed = packed.get();
  int4.y = y;
  int4.workspace = workspace.get();
  check_refused(polyspec::int4_product(int4));
  CHECK_EQ(-7.0f, y[0]);

  float out[32];
  polyspec::AttentionParams attention;
  attention.batch = attention.heads = attention.groups = attention.tokens = attention.length = 1;
  attention.width = attention.value_width = 32;
  attention.query = attention.key = attention.value = x;
  attention.out = out;
  check_refused(polyspec::attention(attention));

  polyspec::RmsNormParams norm;
  norm.tokens = norm.width = 1;
  norm.epsilon = 1.0f;
  norm.x = norm.weight = x;
  norm.y = y;
  check_refused(polyspec::rms_norm(norm));
  CHECK_EQ(-7.0f, y[0]);
}

}  // namespace

int main() {
  setenv("POLYSPEC_CPU_ISA", "avx3", 1);
  test_names();
  test_operators();
  return 0;
}
