// How many CTAs a launch gives a group, and among how many groups the rows of a verification are
// shared out.
#include "cuda/launch_shape.hpp"

#include "cuda/dense.hpp"
#include "cuda/int4_plan.hpp"
#include "support/check.hpp"

namespace {

void test_ctas() {
  using polyspec::cuda::ctas_per_group;
  CHECK_EQ(8, ctas_per_group(1, 128256, 132));
  CHECK_EQ(8, ctas_per_group(16, 128256, 132));
  CHECK_EQ(4, ctas_per_group(17, 128256, 132));
  CHECK_EQ(2, ctas_per_group(66, 128256, 132));
  CHECK_EQ(1, ctas_per_group(67, 128256, 132));
  CHECK_EQ(1, ctas_per_group(1, 8191, 132));
  CHECK_EQ(2, ctas_per_group(1, 8192, 132));
  CHECK_EQ(1, ctas_per_group(1, 128256, 0));  // a device that could not be asked
  CHECK_EQ(1, ctas_per_group(int64_t{1} << 40, 128256, 132));
}

void test_queries_of_cta() {
  using polyspec::cuda::kFewQueries;
  using polyspec::cuda::kManyQueries;
  const auto of = [](int64_t queries, int64_t tasks, int64_t width = 128, int most = kManyQueries) {
    return polyspec::cuda::queries_of_cta(queries, tasks, polyspec::cuda::most_queries(most, width),
                                          132);
  };
  CHECK_EQ(52, of(52, 128));  // 13 tokens of 4 heads over 8192 keys of 8 heads: keys are read once
  CHECK_EQ(64, of(64, 128));
  CHECK_EQ(33, of(65, 128));
  CHECK_EQ(26, of(52, 64));  // half the multiprocessors would have no CTA
  CHECK_EQ(4, of(52, 8));
  CHECK_EQ(4, of(4, 1));
  CHECK_EQ(1, of(1, 512));
  CHECK_EQ(26, of(52, 128, 256));               // wide heads
  CHECK_EQ(13, of(52, 128, 128, kFewQueries));  // less shared memory
  CHECK_EQ(16, of(int64_t{1} << 40, int64_t{1} << 40, 256, kFewQueries));
}

void test_row_groups() {
  const auto check = [](int64_t groups, int ctas, int64_t batch, int64_t rows, int64_t vocab,
                        int multiprocessors, bool clusters = true, bool residuals = false) {
    const auto found =
        polyspec::cuda::row_groups(batch, rows, vocab, multiprocessors, clusters, residuals);
    CHECK_EQ(groups, found.groups);
    if (groups > 0) CHECK_EQ(ctas, found.ctas);
  };
  check(11, 8, 1, 11, 128256, 132);  // all rows at once
  check(22, 4, 2, 11, 128256, 132);
  check(33, 4, 3, 11, 128256, 132);
  check(33, 4, 4, 11, 128256, 132);  // in two waves
  check(66, 2, 8, 11, 128256, 132);
  check(66, 2, 12, 11, 128256, 132);
  check(132, 1, 13, 11, 128256, 132);
  check(132, 1, 256, 11, 128256, 132);
  check(16, 8, 2, 11, 128256, 132, true, true);  // residuals: large groups
  check(16, 8, 8, 11, 128256, 132, true, true);
  check(33, 4, 9, 11, 128256, 132, true, true);
  check(33, 4, 16, 11, 128256, 132, true, true);
  check(132, 1, 64, 11, 128256, 132, true, true);
  check(99, 1, 9, 11, 128256, 108, false);
  check(108, 1, 10, 11, 128256, 108, false);
  check(0, 1, 1, 1, 128256, 132);
  check(0, 1, 1, 11, 8191, 132);
  check(32, 4, 1, 32, 128256, 132);
  check(0, 1, 1, 33, 128256, 9999);   // more rows than marks
  check(0, 1, 280, 11, 128256, 132);  // more than records
  check(0, 1, int64_t{1} << 40, 11, 128256, 9999);
  check(0, 1, 1, 11, 128256, 0);  // a device that could not be asked
}

void test_tree_rows_at_once() {
  using polyspec::cuda::tree_rows_at_once;
  CHECK(tree_rows_at_once(1, 61, 6, 128256, 132, true));  // 2 CTAs a row, 8 for a walk of 4 rows
  CHECK(!tree_rows_at_once(1, 61, 5, 128256, 132, true));
  CHECK(!tree_rows_at_once(2, 61, 6, 128256, 132, true));  // 1 CTA a row
  CHECK(tree_rows_at_once(2, 61, 14, 128256, 132, true));
  CHECK(!tree_rows_at_once(3, 61, 60, 128256, 132, true));  // rows that would have to wait
  CHECK(tree_rows_at_once(4, 11, 10, 128256, 132, true));
  CHECK(!tree_rows_at_once(12, 11, 10, 128256, 132, true));
  CHECK(tree_rows_at_once(12, 11, 14, 128256, 132, true));
  CHECK(tree_rows_at_once(1, 108, 1, 128256, 108, false));  // without clusters a walk has one CTA
  CHECK(!tree_rows_at_once(1, 109, 1, 128256, 108, false));
  CHECK(!tree_rows_at_once(1, 1, 0, 128256, 132, true));
  CHECK(!tree_rows_at_once(1, 11, 10, 8191, 132, true));
  CHECK(!tree_rows_at_once(1, 3073, 60, 128256, 9999, true));
  CHECK(!tree_rows_at_once(int64_t{1} << 40, 11, 10, 128256, 9999, true));
}

void test_int4_plan() {
  constexpr int64_t kLarge = 227 * 1024, kSmall = 99 * 1024;  // of sm_90 and 100, of sm_120
  const auto check = [](int shift, int64_t under_way, int64_t inputs, int token_tiles,
                        int64_t shared_memory, int32_t group = 128) {
    const polyspec::Int4Shape shape = {4096, inputs, group};
    const auto plan = polyspec::cuda::int4_plan(shape, token_tiles, shared_memory);
    CHECK_EQ(shift, plan.shift);
    const int64_t stage = 8 * (group == 128 ? 2 : 1) * (128 + 16 * group);
    CHECK_EQ(under_way, plan.stages * stage / 1024);
    const int64_t groups = plan.groups;
    CHECK(inputs <= (groups << plan.shift) * group);
    const int64_t x = groups * token_tiles * (16 * group + 32);
    CHECK(polyspec::cuda::stream_fixed_bytes(token_tiles) + x + plan.stages * stage <=
          shared_memory);
  };
  for (const int64_t inputs : {4096, 5120}) check(inputs == 4096 ? 0 : 1, 136, inputs, 1, kLarge);
  check(2, 136, 11008, 1, kLarge);
  check(2, 136, 14336, 1, kLarge);
  check(3, 136, 28672, 1, kLarge);
  check(2, 136, 4096, 2, kLarge);
  check(3, 136, 11008, 2, kLarge);
  check(3, 136, 14336, 2, kLarge);
  check(3, 68, 28672, 2, kLarge);
  check(3, 136, 4096, 4, kLarge);
  check(3, 102, 11008, 4, kLarge);
  check(3, 68, 14336, 4, kLarge);
  CHECK_EQ(0, polyspec::cuda::int4_plan({4096, 28672, 128}, 4, kLarge).stages);
  check(3, 68, 4096, 1, kSmall);
  CHECK_EQ(0, polyspec::cuda::int4_plan({4096, 4096, 128}, 2, kSmall).stages);
  check(0, 132, 4096, 1, kLarge, 256);
  CHECK_EQ(0, polyspec::cuda::int4_plan({4096, 1 << 17, 128}, 2, kLarge).stages);
  CHECK_EQ(0, polyspec::cuda::int4_plan({4096, 4096, 128}, 1, 0).stages);  // not known
  CHECK_EQ(3, polyspec::cuda::int4_plan({4096, 4096, 128}, 1, kLarge, 8).shift);
}

void test_dense_plan() {
  using polyspec::cuda::dense_plan;
  constexpr int64_t kLarge = 227 * 1024, kSmall = 99 * 1024;
  const auto check = [](int shift, int stages, int64_t inputs, int token_tiles, int64_t most) {
    const auto plan = dense_plan(inputs, token_tiles, most);
    CHECK_EQ(shift, plan.shift);
    CHECK_EQ(stages, plan.stages);
    const int64_t x = (inputs + (32 << shift) - 1) / (32 << shift) * 512 * token_tiles;
    CHECK_EQ(polyspec::cuda::dense_fixed_bytes(token_tiles) + x + stages * 8 * 16 * 320,
             plan.bytes);
    CHECK(plan.bytes <= most);
  };
  check(0, 4, 896, 1, kLarge);
  check(0, 3, 4096, 1, kLarge);
  check(1, 3, 4096, 2, kLarge);
  check(1, 3, 11008, 1, kLarge);
  check(2, 3, 11008, 2, kLarge);
  check(2, 4, 14336, 1, kLarge);
  check(3, 3, 14336, 2, kLarge);
  check(3, 2, 33536, 2, kLarge);
  check(3, 2, 4096, 1, kSmall);
  CHECK_EQ(0, dense_plan(33536 + 32, 2, kLarge).stages);
  CHECK_EQ(0, dense_plan(4096, 1, 0).stages);  // not known
  CHECK_EQ(3, dense_plan(4096, 1, kLarge, 8).shift);
}

void test_requests() {
  using polyspec::cuda::Requests;
  using polyspec::cuda::requests_of;
  const float numbers[] = {0.0f};
  const int64_t counts[] = {0};
  polyspec::SamplingParams plain;
  CHECK(requests_of(plain, true) == Requests::kUnfiltered);
  CHECK(requests_of(plain, false) == Requests::kAny);
  polyspec::SamplingParams greedy;
  greedy.temperature.value = 0.0f;
  CHECK(requests_of(greedy, true) == Requests::kGreedy);
  CHECK(requests_of(greedy, false) == Requests::kGreedy);  // draft rows are not read
  polyspec::SamplingParams by_request = greedy;
  by_request.temperature.data = numbers;
  CHECK(requests_of(by_request, true) == Requests::kUnfiltered);
  for (const polyspec::SamplingParams& own : {plain, greedy}) {
    polyspec::SamplingParams filtered[6] = {own, own, own, own, own, own};
    filtered[0].top_k.value = 1;
    filtered[1].top_p.value = 0.9f;
    filtered[2].min_p.value = 0.1f;
    filtered[3].top_k.data = counts;
    filtered[4].top_p.data = numbers;
    filtered[5].min_p.data = numbers;
    for (const auto& one : filtered) CHECK(requests_of(one, true) == Requests::kAny);
  }
}

}  // namespace

int main() {
  test_requests();
  test_int4_plan();
  test_dense_plan();
  test_tree_rows_at_once();
  test_ctas();
  test_queries_of_cta();
  test_row_groups();
  return 0;
}
