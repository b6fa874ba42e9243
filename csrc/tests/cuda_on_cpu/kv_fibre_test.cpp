// Pages handed out and taken back by a group of fibres, as the CUDA kernel does with a CTA, against
// the CPU backend: the same block tables, free lists and statuses, batches larger than the group
// and damaged tables included.
#define POLYSPEC_CORE core_fibre_pages
#define POLYSPEC_FN inline

#include <cstring>
#include <numeric>
#include <vector>

#include "core/kv_pages.hpp"
#include "cuda_on_cpu/fibre/fibre_group.hpp"

namespace {

using namespace polyspec::core_fibre_pages;
using polyspec::PagesParams;

struct Pool {
  explicit Pool(cases::Random& random)
      : rows(1 + random.below(70)),
        pages(1 + random.below(150)),
        max_pages(1 + random.below(6)),
        page_size(1 + random.below(5)),
        table(static_cast<size_t>(rows * max_pages), -1),
        free_pages(static_cast<size_t>(pages)),
        held(static_cast<size_t>(rows), 0),
        lengths(held),
        status(static_cast<size_t>(rows), -77),
        free_count(pages) {
    std::iota(free_pages.begin(), free_pages.end(), 0);
  }

  PagesParams params() {
    PagesParams p;
    p.batch = rows;
    p.pages = pages;
    p.page_size = page_size;
    p.max_pages = max_pages;
    p.lengths = lengths.data();
    p.block_table = table.data();
    p.block_table_stride = max_pages;
    p.held = held.data();
    p.free_pages = free_pages.data();
    p.free_count = &free_count;
    p.status = status.data();
    return p;
  }

  void request(cases::Random& random) {
    for (int64_t& length : lengths) length = random.below(page_size * max_pages + 3) - 1;
    if (random.chance(0.1)) held[static_cast<size_t>(random.below(rows))] = max_pages + 1;
    if (random.chance(0.1)) table[static_cast<size_t>(random.below(rows * max_pages))] = 9999;
    if (random.chance(0.03)) free_count = pages + 1;
  }

  bool operator==(const Pool& other) const {
    return table == other.table && free_pages == other.free_pages && held == other.held &&
           lengths == other.lengths && status == other.status && free_count == other.free_count;
  }

  int64_t rows, pages, max_pages, page_size;
  std::vector<int32_t> table, free_pages;
  std::vector<int64_t> held, lengths;
  std::vector<int32_t> status;
  int64_t free_count;
};

struct Shape {
  int size, lanes;
};
constexpr Shape kShapes[] = {{1, 1}, {4, 4}, {32, 32}, {64, 32}, {48, 8}};

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    cases::Random random(seed);
    Pool pool(random);
    const Shape shape = random.one_of(kShapes);
    fibre::Machine machine(shape.size, shape.lanes, fibre::kOrders[seed % 3], seed);
    static Scratch scratch;
    for (int step = 0; step < 6; ++step) {
      const bool reserve = step % 2 == 0;
      pool.request(random);
      Pool expected = pool;
      const PagesParams there = expected.params();
      CHECK((reserve ? polyspec::reserve_pages(there) : polyspec::truncate_pages(there)).ok());
      const PagesParams here = pool.params();
      machine.run([&](int rank) {
        FibreGroup group(machine, scratch, rank);
        if (reserve) move_pages<true>(group, here);
        if (!reserve) move_pages<false>(group, here);
      });
      CHECK(expected == pool);
    }
  }
  return 0;
}
