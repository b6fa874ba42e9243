// How many CTAs a launch gives a request, and when it does the rows of a verification at once.
#include "cuda/launch_shape.hpp"

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

void test_rows_at_once() {
  using polyspec::cuda::rows_at_once;
  CHECK(rows_at_once(1, 11, 128256, 132, true));
  CHECK(rows_at_once(3, 11, 128256, 132, true));
  CHECK(!rows_at_once(4, 11, 128256, 132, true));
  CHECK(rows_at_once(9, 11, 128256, 108, false));
  CHECK(!rows_at_once(10, 11, 128256, 108, false));
  CHECK(!rows_at_once(1, 1, 128256, 132, true));
  CHECK(!rows_at_once(1, 11, 8191, 132, true));
  CHECK(!rows_at_once(1, 1025, 128256, 9999, true));
  CHECK(!rows_at_once(int64_t{1} << 40, 11, 128256, 9999, true));
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
  CHECK(!tree_rows_at_once(1, 1025, 60, 128256, 9999, true));
  CHECK(!tree_rows_at_once(int64_t{1} << 40, 11, 10, 128256, 9999, true));
}

}  // namespace

int main() {
  test_tree_rows_at_once();
  test_ctas();
  test_rows_at_once();
  return 0;
}
