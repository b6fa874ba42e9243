// Pages handed out and taken back, over a thread group: one thread per row, and a scan for each
// row's offset in the free list. The sums are integers and rows are served in order, so every group
// gives the same block tables.
#pragma once

#include "core/group.hpp"
#include "polyspec/kv_cache.hpp"

namespace polyspec::POLYSPEC_CORE {

POLYSPEC_FN int64_t pages_for(const PagesParams& p, int64_t tokens) {
  return tokens / p.page_size + (tokens % p.page_size != 0);
}

// The number of pages that a row gets or returns, and its error bits; 0 pages with an error.
struct PageDemand {
  int64_t pages;
  int32_t status;
};

POLYSPEC_FN PageDemand reserve_demand(const PagesParams& p, int64_t row) {
  const int64_t held = p.held[row];
  if (held < 0 || held > p.max_pages) return {0, kStatusBadPage};
  if (p.lengths[row] < 0) return {0, kStatusBadLength};
  const int64_t wanted = pages_for(p, p.lengths[row]);
  if (wanted > p.max_pages) return {0, kStatusCacheFull};
  return {wanted > held ? wanted - held : 0, 0};
}

POLYSPEC_FN PageDemand truncate_demand(const PagesParams& p, int64_t row) {
  const int64_t held = p.held[row];
  if (held < 0 || held > p.max_pages) return {0, kStatusBadPage};
  if (p.lengths[row] < 0) return {0, kStatusBadLength};
  const int64_t kept = pages_for(p, p.lengths[row]);
  const int32_t* table = p.block_table + row * p.block_table_stride;
  for (int64_t j = kept; j < held; ++j) {
    if (table[j] < 0 || table[j] >= p.pages) return {0, kStatusBadPage};
  }
  return {held > kept ? held - kept : 0, 0};
}

// `offset` pages go to rows before this one. False: the list does not have them.
POLYSPEC_FN bool reserve_row(const PagesParams& p, int64_t row, int64_t free, int64_t offset,
                             int64_t pages) {
  if (offset + pages > free) return false;
  int32_t* table = p.block_table + row * p.block_table_stride + p.held[row];
  for (int64_t j = 0; j < pages; ++j) table[j] = p.free_pages[free - 1 - offset - j];
  p.held[row] += pages;
  return true;
}

// `offset` pages come from rows before this one. False: more pages than there are.
POLYSPEC_FN bool truncate_row(const PagesParams& p, int64_t row, int64_t free, int64_t offset,
                              int64_t pages) {
  if (free + offset + pages > p.pages) return false;
  int32_t* table = p.block_table + row * p.block_table_stride + p.held[row] - pages;
  for (int64_t j = 0; j < pages; ++j) {
    p.free_pages[free + offset + j] = table[j];
    table[j] = -1;
  }
  p.held[row] -= pages;
  return true;
}

// Offsets count the demand of failing rows too; as they only grow, the rows served are a prefix of
// the rows in need and the list stays whole.
template <bool kReserve, class Group>
POLYSPEC_FN void move_pages(Group& group, const PagesParams& p) {
  const int64_t free = *p.free_count;
  const bool sound = free >= 0 && free <= p.pages;
  int64_t before = 0;  // demand of the rows of earlier rounds
  int64_t moved = 0;   // pages that this thread moved
  for (int64_t first = 0; first < p.batch; first += group.size()) {
    const int64_t row = first + group.rank();
    PageDemand demand{0, 0};
    if (row < p.batch) demand = kReserve ? reserve_demand(p, row) : truncate_demand(p, row);
    const uint64_t wanted = static_cast<uint64_t>(demand.pages);
    const int64_t offset = before + static_cast<int64_t>(group.exclusive_scan(wanted));
    before += static_cast<int64_t>(group.sum(wanted));
    if (row >= p.batch) continue;
    if (!sound) {
      demand.status = kStatusBadPage;
    } else if (demand.pages > 0) {
      const bool served = kReserve ? reserve_row(p, row, free, offset, demand.pages)
                                   : truncate_row(p, row, free, offset, demand.pages);
      if (served) moved += demand.pages;
      if (!served) demand.status = kReserve ? kStatusCacheFull : kStatusBadPage;
    }
    p.status[row] = demand.status;
  }
  const int64_t all = static_cast<int64_t>(group.sum(static_cast<uint64_t>(moved)));
  if (group.rank() == 0 && sound) *p.free_count = kReserve ? free - all : free + all;
}

}  // namespace polyspec::POLYSPEC_CORE
