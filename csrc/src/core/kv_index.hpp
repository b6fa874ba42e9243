// Where keys and values go: the index arithmetic of the cache operators, the same for the CPU and
// for CUDA.
//
// The functions named *_lane are the work of one CUDA thread. They are plain functions of the
// thread's index, so a test runs them on the CPU, in any order, against the CPU backend.
#pragma once

#include "core/numeric.hpp"
#include "polyspec/kv_cache.hpp"
#include "polyspec/philox.hpp"  // POLYSPEC_HD

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kNoLimit = int64_t{1} << 62;

// The unit that one thread moves.
struct alignas(16) Lane16 {
  uint64_t low, high;
};

template <class Lane>
POLYSPEC_HD const Lane* lane_at(const void* base, int64_t element, int32_t element_size,
                                int64_t lane) {
  return reinterpret_cast<const Lane*>(static_cast<const char*>(base) + element * element_size) +
         lane;
}
template <class Lane>
POLYSPEC_HD Lane* lane_at(void* base, int64_t element, int32_t element_size, int64_t lane) {
  return reinterpret_cast<Lane*>(static_cast<char*>(base) + element * element_size) + lane;
}

// ---- Append ----

// The new tokens of one row, checked. With an error nothing is appended.
struct RowAppend {
  int64_t begin;  // position of the first
  int64_t count;
  int32_t status;
};

// `limit` is the first position that does not exist.
POLYSPEC_HD RowAppend row_append(const NewTokens& in, int64_t row, int64_t limit) {
  const int64_t begin = in.lengths[row];
  const int64_t count = in.counts == nullptr ? in.tokens : in.counts[row];
  if (begin < 0 || count < 0 || count > in.tokens) return {begin, 0, kStatusBadLength};
  if (begin > limit - count) return {begin, 0, kStatusCacheFull};
  return {begin, count, 0};
}

POLYSPEC_HD int64_t append_limit(const AppendParams& p) { return p.ring ? kNoLimit : p.capacity; }

// Slot of a position, or -1 where a later token of the same block takes the slot.
POLYSPEC_HD int64_t append_slot(const AppendParams& p, const RowAppend& row, int64_t position) {
  if (!p.ring || position < p.sinks) return position;
  const int64_t ring = p.capacity - p.sinks;
  if (position < row.begin + row.count - ring) return -1;
  return p.sinks + (position - p.sinks) % ring;
}

// One row's status, written by one thread.
POLYSPEC_HD void finish_row(const NewTokens& in, int64_t row, const RowAppend& plan) {
  in.status[row] = plan.status;
  if (in.new_lengths != nullptr)
    in.new_lengths[row] = plan.status == 0 ? plan.begin + plan.count : plan.begin;
}

POLYSPEC_HD void update_length(const LengthsParams& p, int64_t row) {
  int64_t length = p.lengths[row];
  if (p.most != nullptr) {
    if (length > p.most[row]) length = p.most[row];
    if (length < 0) length = 0;
  }
  int64_t count = p.counts == nullptr ? p.tokens : p.counts[row];
  if (count > p.tokens) count = p.tokens;
  if (count < 0) count = 0;
  int64_t out = 0;
  if (p.above != nullptr) {
    out = p.above[row] - length;
    if (out > count) out = count;
    if (out > p.first[row]) out = p.first[row];
    if (out < 0) out = 0;
    p.rest[row] = out;
    p.rest[p.batch + row] = count - out;
    p.rest[2 * p.batch + row] = p.first[row] - out;
  }
  if (p.base != nullptr) p.base[row] = length + out;
  p.lengths[row] = length + count;
}

// ---- Rows from a position ----

POLYSPEC_HD int64_t first_position(const CopyRowsParams& p, int64_t row) {
  return (p.at == nullptr ? 0 : p.at[row]) - (p.less == nullptr ? 0 : p.less[row]) + p.plus;
}

// Slot of row j, or -1 where it is left out.
POLYSPEC_HD int64_t slot_of(const CopyRowsParams& p, int64_t row, int64_t j) {
  const int64_t position = first_position(p, row) + j;
  if (!p.ring) return position < 0 ? 0 : position < p.slots ? position : p.slots - 1;
  if (p.put && (j < p.width - p.slots || (p.skip != nullptr && j < p.skip[row]) ||
                (p.lowest != nullptr && position < p.lowest[row * p.lowest_stride])))
    return -1;
  const int64_t slot = position % p.slots;
  return slot < 0 ? slot + p.slots : slot;
}

POLYSPEC_HD bool has_part(const CopyRowsParams& p, int64_t row) {
  return p.part == nullptr || p.part[row] != 0;
}

// The window of one row, written by one thread.
POLYSPEC_HD void finish_window(const CopyRowsParams& p, int64_t row) {
  if (p.begin != nullptr && first_position(p, row) < p.begin[row])
    p.begin[row] = first_position(p, row);
  if (p.end != nullptr) p.end[row] = p.kept[row];
}

POLYSPEC_HD const char* source_of(const CopyRowsParams& p, int64_t row, int64_t j, int64_t slot) {
  return static_cast<const char*>(p.from) + row * p.from_stride[0] +
         (p.put ? j : slot) * p.from_stride[1];
}
POLYSPEC_HD char* target_of(const CopyRowsParams& p, int64_t row, int64_t j, int64_t slot) {
  return static_cast<char*>(p.to) + row * p.to_stride[0] + (p.put ? slot : j) * p.to_stride[1];
}

// Thread x of a batch row: lane x % lanes of row x / lanes. Thread 0 also moves the window.
template <class Lane>
POLYSPEC_HD void copy_rows_lane(const CopyRowsParams& p, int64_t row, int64_t x) {
  if (!has_part(p, row)) return;
  if (x == 0) finish_window(p, row);
  const int64_t lanes = p.bytes / static_cast<int64_t>(sizeof(Lane));
  const int64_t j = x / lanes, lane = x - j * lanes;
  const int64_t slot = j < p.width ? slot_of(p, row, j) : -1;
  if (slot < 0) return;
  reinterpret_cast<Lane*>(target_of(p, row, j, slot))[lane] =
      reinterpret_cast<const Lane*>(source_of(p, row, j, slot))[lane];
}

// Lanes of one token: of its key, then of its value.
struct TokenLanes {
  int32_t key, value;
  POLYSPEC_HD int32_t all() const { return key + value; }
};
template <class Lane>
POLYSPEC_HD TokenLanes token_lanes(int64_t key_dim, int64_t value_dim, int32_t element_size) {
  return {static_cast<int32_t>(key_dim * element_size / static_cast<int64_t>(sizeof(Lane))),
          static_cast<int32_t>(value_dim * element_size / static_cast<int64_t>(sizeof(Lane)))};
}

POLYSPEC_HD int64_t offset_of(const int64_t (&stride)[3], int64_t row, int64_t head,
                              int64_t token) {
  return row * stride[0] + head * stride[1] + token * stride[2];
}

// Copies one lane of token `token` of (row, head) to (cache_row, head, slot).
template <class Lane>
POLYSPEC_HD void copy_new(const NewTokens& in, const KvCache& keys, const KvCache& values,
                          TokenLanes lanes, int32_t lane, int64_t row, int64_t head, int64_t token,
                          int64_t cache_row, int64_t slot) {
  const bool key = lane < lanes.key;
  const KvSource& from = key ? in.keys : in.values;
  const KvCache& to = key ? keys : values;
  const int32_t at = key ? lane : lane - lanes.key;
  *lane_at<Lane>(to.data, offset_of(to.stride, cache_row, head, slot), in.element_size, at) =
      *lane_at<Lane>(from.data, offset_of(from.stride, row, head, token), in.element_size, at);
}

// Thread x of (row, head): lane x % lanes of token x / lanes. Thread 0 of head 0 also writes the
// row's status.
template <class Lane>
POLYSPEC_HD void append_lane(const AppendParams& p, int64_t row, int64_t head, int64_t x) {
  const NewTokens& in = p.in;
  const RowAppend plan = row_append(in, row, append_limit(p));
  if (head == 0 && x == 0) finish_row(in, row, plan);
  const TokenLanes lanes = token_lanes<Lane>(in.key_dim, in.value_dim, in.element_size);
  const int64_t token = x / lanes.all();
  if (token >= plan.count) return;
  const int64_t slot = append_slot(p, plan, plan.begin + token);
  if (slot < 0) return;
  copy_new<Lane>(in, p.keys, p.values, lanes, static_cast<int32_t>(x - token * lanes.all()), row,
                 head, token, row, slot);
}

// Page of a position, or -1 where the block table has none.
POLYSPEC_HD int64_t page_of(const PagedAppendParams& p, int64_t row, int64_t position) {
  const int32_t page = p.block_table[row * p.block_table_stride + position / p.page_size];
  return page >= 0 && page < p.pages ? page : -1;
}

POLYSPEC_HD RowAppend row_append_paged(const PagedAppendParams& p, int64_t row) {
  return row_append(p.in, row, p.max_pages * p.page_size);
}

// The status needs every page that is written to.
POLYSPEC_HD RowAppend checked_pages(const PagedAppendParams& p, int64_t row, RowAppend plan) {
  const int64_t end = plan.begin + plan.count;
  for (int64_t at = plan.begin / p.page_size; plan.count > 0 && at * p.page_size < end; ++at) {
    if (page_of(p, row, at * p.page_size) < 0) plan.status = kStatusBadPage;
  }
  return plan;
}

template <class Lane>
POLYSPEC_HD void append_paged_lane(const PagedAppendParams& p, int64_t row, int64_t head,
                                   int64_t x) {
  const NewTokens& in = p.in;
  const RowAppend plan = row_append_paged(p, row);
  if (head == 0 && x == 0) finish_row(in, row, checked_pages(p, row, plan));
  const TokenLanes lanes = token_lanes<Lane>(in.key_dim, in.value_dim, in.element_size);
  const int64_t token = x / lanes.all();
  if (token >= plan.count) return;
  const int64_t position = plan.begin + token;
  const int64_t page = page_of(p, row, position);
  if (page < 0) return;
  copy_new<Lane>(in, p.keys, p.values, lanes, static_cast<int32_t>(x - token * lanes.all()), row,
                 head, token, page, position % p.page_size);
}

// ---- Tree ----

struct RowPath {
  const int64_t* nodes;
  int64_t begin;  // slot of node 0
  int64_t count;  // accepted nodes
  int32_t status;
};

POLYSPEC_HD RowPath row_path(const CompactTreeParams& p, int64_t row) {
  const int64_t* nodes = p.path + row * p.path_len;
  const int64_t begin = p.lengths[row];
  if (begin < 0 || begin > p.capacity) return {nodes, begin, 0, kStatusBadLength};
  int64_t last = -1;
  int64_t count = 0;
  for (; count < p.path_len && nodes[count] != -1; ++count) {
    if (nodes[count] <= last || nodes[count] >= p.capacity - begin)
      return {nodes, begin, 0, kStatusBadPath};
    last = nodes[count];
  }
  return {nodes, begin, count, 0};
}

POLYSPEC_HD void finish_path(const CompactTreeParams& p, int64_t row, const RowPath& path) {
  p.status[row] = path.status;
  if (p.new_lengths != nullptr) p.new_lengths[row] = path.begin + path.count;
}

// Thread x of a layer: one lane of one (row, head), keys before values. Slot j is read by no move
// after j, so loads may run ahead of stores: kAhead of them, to have their latencies overlap.
template <class Lane>
POLYSPEC_HD void compact_lane(const CompactTreeParams& p, int64_t layer, int64_t row, int64_t head,
                              int32_t lane) {
  constexpr int kAhead = 4;
  const RowPath path = row_path(p, row);
  if (layer == 0 && head == 0 && lane == 0) finish_path(p, row, path);
  const TokenLanes lanes = token_lanes<Lane>(p.key_dim, p.value_dim, p.element_size);
  const bool key = lane < lanes.key;
  const int64_t step = key ? p.key_stride[2] : p.value_stride[2];
  const int64_t first = key ? offset_of(p.key_stride, row, head, path.begin)
                            : offset_of(p.value_stride, row, head, path.begin);
  void* base = key ? p.keys[layer] : p.values[layer];
  const int32_t at = key ? lane : lane - lanes.key;
  for (int64_t j = 0; j < path.count; j += kAhead) {
    Lane moved[kAhead];
    POLYSPEC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (j + i < path.count)
        moved[i] = *lane_at<Lane>(base, first + path.nodes[j + i] * step, p.element_size, at);
    }
    POLYSPEC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (j + i < path.count)
        *lane_at<Lane>(base, first + (j + i) * step, p.element_size, at) = moved[i];
    }
  }
}

}  // namespace polyspec::POLYSPEC_CORE
