// Pages: reserved, filled, returned, and block tables and free lists that are damaged.
#include "support/check.hpp"
#include "support/kv_blocks.hpp"

namespace {

using namespace kv_blocks;

constexpr int64_t kPages = 24, kPageSize = 4, kMaxPages = 6, kRows = 5;

struct Pool {
  std::vector<int32_t> table =
      std::vector<int32_t>(kRows * (kMaxPages + 1), -9);  // one column of guard
  std::vector<int64_t> held = std::vector<int64_t>(kRows, 0);
  std::vector<int32_t> free_pages = std::vector<int32_t>(kPages + 2, -9);
  int64_t free_count = kPages;
  std::vector<int64_t> lengths = std::vector<int64_t>(kRows, 0);
  std::vector<int32_t> status = std::vector<int32_t>(kRows, -77);

  Pool() { std::iota(free_pages.begin() + 1, free_pages.end() - 1, 0); }
  PagesParams params() {
    PagesParams p;
    p.batch = kRows;
    p.pages = kPages;
    p.page_size = kPageSize;
    p.max_pages = kMaxPages;
    p.lengths = lengths.data();
    p.block_table = table.data();
    p.block_table_stride = kMaxPages + 1;
    p.held = held.data();
    p.free_pages = free_pages.data() + 1;
    p.free_count = &free_count;
    p.status = status.data();
    return p;
  }
  // Every page is in exactly one list, and memory outside is unchanged.
  void check_whole() const {
    std::vector<int> seen(kPages, 0);
    for (int64_t i = 0; i < free_count; ++i) ++seen.at(static_cast<size_t>(free_pages[1 + i]));
    for (int64_t b = 0; b < kRows; ++b) {
      for (int64_t j = 0; j < held[b]; ++j)
        ++seen.at(static_cast<size_t>(table[b * (kMaxPages + 1) + j]));
      CHECK_EQ(-9, table[b * (kMaxPages + 1) + kMaxPages]);
    }
    for (const int count : seen) CHECK_EQ(1, count);
    CHECK_EQ(-9, free_pages.front());
    CHECK_EQ(-9, free_pages.back());
  }
};

void test_pages() {
  std::mt19937_64 random(5);
  Pool pool;
  for (int step = 0; step < 400; ++step) {
    const bool reserve = step % 2 == 0;
    const Pool before = pool;
    for (int64_t& length : pool.lengths)
      length = static_cast<int64_t>(random() % (kPageSize * kMaxPages + 4)) - 1;
    CHECK((reserve ? reserve_pages(pool.params()) : truncate_pages(pool.params())).ok());
    pool.check_whole();
    int64_t free = before.free_count;
    bool exhausted = false;
    for (int64_t b = 0; b < kRows; ++b) {
      const int64_t length = pool.lengths[b];
      const int64_t wanted = (length + kPageSize - 1) / kPageSize;
      int64_t held = before.held[b];
      int32_t status = 0;
      if (length < 0) {
        status = kStatusBadLength;
      } else if (reserve && wanted > kMaxPages) {
        status = kStatusCacheFull;
      } else if (reserve && wanted > held) {
        exhausted = exhausted || wanted - held > free;
        if (exhausted) status = kStatusCacheFull;
        if (!exhausted) {
          free -= wanted - held;
          held = wanted;
        }
      } else if (!reserve && wanted < held) {
        held = wanted;
      }
      CHECK_EQ(status, pool.status[b]);
      CHECK_EQ(held, pool.held[b]);
      // Pages kept are the same pages; returned entries read -1.
      for (int64_t j = 0; j < std::min(held, before.held[b]); ++j) {
        CHECK_EQ(before.table[b * (kMaxPages + 1) + j], pool.table[b * (kMaxPages + 1) + j]);
      }
      for (int64_t j = held; j < before.held[b]; ++j)
        CHECK_EQ(-1, pool.table[b * (kMaxPages + 1) + j]);
    }
  }
}

void test_pages_order() {
  Pool pool;
  pool.lengths = {5, 0, 8, 1, 0};
  CHECK(reserve_pages(pool.params()).ok());
  const int32_t first[] = {23, 22};
  const int32_t third[] = {21, 20};
  for (int j = 0; j < 2; ++j) CHECK_EQ(first[j], pool.table[j]);
  for (int j = 0; j < 2; ++j) CHECK_EQ(third[j], pool.table[2 * (kMaxPages + 1) + j]);
  CHECK_EQ(19, pool.table[3 * (kMaxPages + 1)]);
  pool.lengths = {4, 0, 0, 1, 0};
  CHECK(truncate_pages(pool.params()).ok());
  CHECK_EQ(22, pool.free_count);
  const int32_t pushed[] = {22, 21, 20};  // row 0's page, then row 2's two, after the 19 left
  for (int j = 0; j < 3; ++j) CHECK_EQ(pushed[j], pool.free_pages[1 + 19 + j]);
}

void test_damaged_pages() {
  Pool pool;
  pool.lengths = {8, 8, 8, 0, 0};
  CHECK(reserve_pages(pool.params()).ok());
  pool.lengths = {0, 0, 0, 0, 0};
  pool.table[kMaxPages + 1] = kPages;  // row 1: an unknown page
  pool.held[3] = kMaxPages + 1;        // row 3: more than a table holds
  const Pool before = pool;
  CHECK(truncate_pages(pool.params()).ok());
  CHECK_EQ(0, pool.status[0]);
  CHECK_EQ(static_cast<int>(kStatusBadPage), pool.status[1]);
  CHECK_EQ(0, pool.status[2]);
  CHECK_EQ(static_cast<int>(kStatusBadPage), pool.status[3]);
  CHECK_EQ(2, pool.held[1]);
  CHECK_EQ(before.free_count + 4, pool.free_count);

  Pool twice;  // all pages are free and a row claims one of them
  twice.held[0] = 1;
  twice.table[0] = 3;
  CHECK(truncate_pages(twice.params()).ok());
  CHECK_EQ(static_cast<int>(kStatusBadPage), twice.status[0]);
  CHECK_EQ(kPages, twice.free_count);
  CHECK_EQ(-9, twice.free_pages.back());

  Pool broken;
  broken.free_count = kPages + 1;
  broken.lengths[0] = 4;
  CHECK(reserve_pages(broken.params()).ok());
  CHECK_EQ(static_cast<int>(kStatusBadPage), broken.status[0]);
  CHECK_EQ(0, broken.held[0]);
}

void test_append_paged() {
  std::mt19937_64 random(17);
  for (const int32_t size : {1, 2, 4}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const int64_t heads = 2, tokens = 7, key_dim = 8, value_dim = 4;
      const Shape s{kRows, heads, tokens, 1, key_dim, value_dim, size, repeat % 2, false, 0};
      AppendCase c(s, random);
      Block keys(kPages, heads, kPageSize, key_dim, size, s.pad),
          values(kPages, heads, kPageSize, value_dim, size, s.pad);
      Pool pool;
      for (int64_t b = 0; b < kRows; ++b) {
        c.lengths[b] = static_cast<int64_t>(random() % 20);
        c.counts[b] = static_cast<int64_t>(random() % (tokens + 1));
        pool.lengths[b] = std::min(c.lengths[b] + c.counts[b], kPageSize * kMaxPages);
      }
      pool.lengths[3] = 0;  // has no pages
      CHECK(reserve_pages(pool.params()).ok());
      PagedAppendParams p;
      p.in = c.params(s, true).in;
      p.pages = kPages;
      p.page_size = kPageSize;
      p.max_pages = kMaxPages;
      p.block_table = pool.table.data();
      p.block_table_stride = kMaxPages + 1;

      Block expected_keys = keys, expected_values = values;
      std::vector<int32_t> status(kRows, 0);
      std::vector<int64_t> lengths = c.lengths;
      for (int64_t b = 0; b < kRows; ++b) {
        const int64_t end = c.lengths[b] + c.counts[b];
        if (end > kPageSize * kMaxPages) status[b] = kStatusCacheFull;
        for (int64_t i = 0; status[b] != kStatusCacheFull && i < c.counts[b]; ++i) {
          const int64_t at = c.lengths[b] + i;
          const int32_t page = pool.table[b * (kMaxPages + 1) + at / kPageSize];
          if (page < 0) {
            status[b] = kStatusBadPage;
            continue;
          }
          for (int64_t h = 0; h < heads; ++h) {
            std::memcpy(expected_keys.at(page, h, at % kPageSize), c.new_keys.at(b, h, i),
                        key_dim * size);
            std::memcpy(expected_values.at(page, h, at % kPageSize), c.new_values.at(b, h, i),
                        value_dim * size);
          }
        }
        if (status[b] == 0) lengths[b] = end;
      }
      Block cpu_keys = keys, cpu_values = values;
      p.keys = cpu_keys.cache();
      p.values = cpu_values.cache();
      CHECK(append_paged(p).ok());
      CHECK(expected_keys == cpu_keys);
      CHECK(expected_values == cpu_values);
      CHECK(status == c.status);
      CHECK(lengths == c.new_lengths);

      Block gpu_keys = keys, gpu_values = values;
      p.keys = gpu_keys.cache();
      p.values = gpu_values.cache();
      std::fill(c.status.begin(), c.status.end(), -77);
      with_lane(core::lane_bytes(p), [&](auto lane) {
        using Lane = decltype(lane);
        const int64_t threads = tokens * core::token_lanes<Lane>(key_dim, value_dim, size).all();
        for (const int64_t i : shuffled(kRows * heads * threads, random)) {
          core::append_paged_lane<Lane>(p, i / threads / heads, i / threads % heads, i % threads);
        }
      });
      CHECK(expected_keys == gpu_keys);
      CHECK(expected_values == gpu_values);
      CHECK(status == c.status);
    }
  }
}

void test_arguments() {
  Pool pool;
  PagesParams pages = pool.params();
  pages.page_size = 0;
  CHECK(truncate_pages(pages).code == Result::Code::kInvalidArgument);
  PagedAppendParams paged;
  paged.page_size = int64_t{1} << 40;
  paged.max_pages = int64_t{1} << 40;
  paged.pages = 1;
  CHECK(append_paged(paged).code == Result::Code::kInvalidArgument);
}

}  // namespace

int main() {
  test_pages();
  test_pages_order();
  test_damaged_pages();
  test_append_paged();
  test_arguments();
  return 0;
}
