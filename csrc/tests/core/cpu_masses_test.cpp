// The CPU backend's sums over a range against the same weights added one at a time: whole calls
// would hardly show a residual that is off by one unit of mass. (On x86 the build compiles this
// file for AVX2, with different vector arithmetic.)
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "support/check.hpp"
#include "support/random_case.hpp"

#define POLYSPEC_CORE core_masses
#include "cpu/row_tasks.hpp"

namespace {

using namespace polyspec::core_masses;
using polyspec::DType;
using polyspec::RowStatistics;

template <class Weight>
void check(const Weight& weight, int64_t vocab, cases::Random& random, const std::string& name) {
  for (int i = 0; i < 20; ++i) {
    const int64_t begin = random.below(vocab);
    const int64_t end = begin + random.below(std::min<int64_t>(vocab - begin, 2000)) + 1;
    uint64_t expected = 0;
    for (int64_t x = begin; x < end; ++x) expected += weight(x);
    if (mass_between(weight, begin, end) != expected)
      check::fail(__FILE__, __LINE__, name, std::to_string(begin) + ":" + std::to_string(end));
  }
}

void test(uint64_t seed, DType dtype) {
  cases::Random random(seed);
  const int64_t vocab = 900 + random.below(4000);
  const int64_t draft_vocab = random.chance(0.5) ? vocab : 1 + random.below(vocab);
  std::vector<float> p(static_cast<size_t>(vocab)), q(static_cast<size_t>(draft_vocab));
  std::vector<int32_t> map(static_cast<size_t>(vocab));
  for (float& z : p) z = 3.0f * random.normal();
  for (size_t j = 0; j < q.size(); ++j) q[j] = p[j] + 0.3f * random.normal();
  for (int32_t& j : map) j = static_cast<int32_t>(random.below(draft_vocab + 3)) - 2;
  cases::Block block;
  const DType other = cases::random_dtype(random);
  const size_t p_at = cases::put_logits(block, dtype, p);
  const size_t q_at = cases::put_logits(block, other, q);

  const Filter<> filter{1.0f, slope_of(1.0f), 0, 1.0f, 0.0f};
  Scratch scratch;
  SerialGroup group(scratch);
  const Row<Any> p_row = row_at<Any>(block.bytes.data() + p_at, dtype, 0, vocab);
  const AnyRow q_row = draft_row_at<AnyRow>(block.bytes.data() + q_at, other, 0, draft_vocab);
  RowStatistics p_statistics, q_statistics;
  CHECK_EQ(0, row_statistics(group, p_row, filter, head_room(vocab), &p_statistics));
  CHECK_EQ(0, row_statistics(group, q_row, filter, head_room(draft_vocab), &q_statistics));
  const auto p_weight = token_mass(p_row, p_statistics, filter, head_room(vocab));
  const auto q_weight = token_mass(q_row, q_statistics, filter, head_room(draft_vocab));
  const std::string name = "case " + std::to_string(seed);
  check(p_weight, vocab, random, name + ", target distribution");
  check(q_weight, draft_vocab, random, name + ", draft distribution");
  ResidualWeight<Any> both{p_weight,
                           q_weight,
                           0.9 / static_cast<double>(p_statistics.mass),
                           1.0 / static_cast<double>(q_statistics.mass),
                           mass_unit(head_room(vocab)),
                           nullptr,
                           draft_vocab,
                           -1};
  check(both, vocab, random, name + ", residual");
  both.target_to_draft = map.data();
  check(both, vocab, random, name + ", residual of a mapped draft");
  both.proposed = random.below(vocab);
  check(both, vocab, random, name + ", residual of a deterministic proposal");
}

}  // namespace

int main() {
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 77;
#endif
  for (uint64_t seed = 0; seed < 30; ++seed) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      test(seed, dtype);
  }
  return 0;
}
