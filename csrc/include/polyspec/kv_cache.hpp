// Operators on caches of keys and values: append, pages, and the compaction of an accepted tree
// path.
//
// Contract C7: a contiguous cache rolls back by its lengths alone and moves no bytes, so there is
// no operator for it; a paged cache frees the pages after the new lengths; a tree moves its
// accepted path and nothing else. No call allocates, waits for the device or reads a device value
// on the host, so all can be captured in a graph.
//
// Elements are opaque: 1, 2 or 4 bytes, moved as they are. Strides and dimensions count elements,
// offsets are 64-bit. Keys and values go through one call; their last dimensions may differ (d_k,
// d_v).
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

// Status bits of these operators, in addition to kStatusBadLength of status.hpp. A row with an
// error keeps its length, its pages and the keys and values of its committed tokens.
enum CacheStatusBits : int32_t {
  kStatusBadPath = 1 << 10,    // a tree path that does not increase, or leaves the cache
  kStatusCacheFull = 1 << 11,  // the row's tokens do not fit, or no page is free
  // A page id or a count of pages that cannot be: the block table or the free list is damaged.
  kStatusBadPage = 1 << 12,
};

// Rows of vectors somewhere, unit stride along the vector.
struct KvSource {
  const void* data = nullptr;
  int64_t stride[3] = {0, 0, 0};
};
struct KvCache {
  void* data = nullptr;
  int64_t stride[3] = {0, 0, 0};
};

// Fields common to both append operators.
struct NewTokens {
  int64_t batch = 0;                 // b >= 0
  int64_t heads = 0;                 // h >= 1, heads of keys and values (not of queries)
  int64_t tokens = 0;                // t >= 0
  int64_t key_dim = 0;               // d_k >= 1
  int64_t value_dim = 0;             // d_v >= 1
  int32_t element_size = 0;          // 1, 2 or 4 bytes
  KvSource keys, values;             // [b, h, t, d_k], [b, h, t, d_v]
  const int64_t* lengths = nullptr;  // [b] tokens that each row holds already
  const int64_t* counts = nullptr;   // [b] in [0, t], new tokens of each row, or nullptr: t each

  // [b] lengths + counts, or lengths where the status has an error; may be nullptr, must not be
  // `lengths`, which several threads read.
  int64_t* new_lengths = nullptr;
  int32_t* status = nullptr;  // [b]
};

// Appends to a preallocated cache. Token i of row b goes to position lengths[b] + i. Positions are
// slots, unless `ring`: then the first `sinks` positions keep their slots for ever (attention
// sinks, Xiao et al. 2024, arXiv 2309.17453) and position p lies in slot sinks + (p - sinks) mod
// (capacity - sinks), over the token it displaces. Of a block longer than the ring only the last
// tokens are written. A row that does not fit is not written at all: kStatusCacheFull.
struct AppendParams {
  NewTokens in;
  int64_t capacity = 0;  // c >= 1
  bool ring = false;
  int64_t sinks = 0;     // in [0, c); only with `ring`
  KvCache keys, values;  // [b, h, c, d_k], [b, h, c, d_v]; no overlap with in.keys, in.values
};
POLYSPEC_API Result append(const AppendParams& params, Stream stream = Stream::cpu());

// Appends to a paged cache: position p of row b lies in page block_table[b, p / page_size] at p %
// page_size. The row must hold the pages (reserve_pages); a position without one is not written and
// sets kStatusBadPage.
struct PagedAppendParams {
  NewTokens in;
  int64_t pages = 0;      // n >= 1
  int64_t page_size = 0;  // s >= 1
  int64_t max_pages = 0;  // m >= 0, pages that a row can hold
  KvCache keys, values;   // [n, h, s, d_k], [n, h, s, d_v]
  // [b, m] page ids; entries after a row's pages are not read.
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;  // from one row to the next
};
POLYSPEC_API Result append_paged(const PagedAppendParams& params, Stream stream = Stream::cpu());

// Gives rows the pages they need, or takes back the pages they need no more. One block table serves
// all layers. The free list is a stack: free_pages[0 ... free_count) are the free page ids. Rows
// are served in ascending order, so which page goes where does not depend on timing (contract C3
// wants that of everything).
struct PagesParams {
  int64_t batch = 0;                 // b >= 0
  int64_t pages = 0;                 // n >= 1, below 2^31
  int64_t page_size = 0;             // s >= 1
  int64_t max_pages = 0;             // m >= 0
  const int64_t* lengths = nullptr;  // [b] tokens that each row must be able to hold, or is cut to
  int32_t* block_table = nullptr;    // [b, m] in and out; -1 where a page was taken back
  int64_t block_table_stride = 0;
  int64_t* held = nullptr;        // [b] in and out; row b holds pages block_table[b, 0 ... held[b])
  int32_t* free_pages = nullptr;  // [n] in and out
  int64_t* free_count = nullptr;  // [1] in and out
  int32_t* status = nullptr;      // [b]
};
// Rows that hold too few pages take from the free list's top. When it runs out, this row and later
// rows in need get none: kStatusCacheFull.
POLYSPEC_API Result reserve_pages(const PagesParams& params, Stream stream = Stream::cpu());
// Rows that hold too many pages push them, lowest index first. A page id out of range, or more free
// pages than there are, leaves the row as it is: kStatusBadPage.
POLYSPEC_API Result truncate_pages(const PagesParams& params, Stream stream = Stream::cpu());

// The lengths of rows between two passes and at the begin of a pass, in this order: cut to `most`
// and to no less than 0, copied to `base`, and increased by the new tokens. With `above`, the pass
// leaves out tokens that another level has read already, up to the first token with logits: as many
// as `above` is longer than the row. `base` has the length with these.
struct LengthsParams {
  int64_t batch = 0;                // b >= 0
  int64_t tokens = 0;               // t >= 0, of each row
  int64_t* lengths = nullptr;       // [b] in and out
  const int64_t* most = nullptr;    // [b], or nullptr: no cut
  int64_t* base = nullptr;          // [b] out, or nullptr
  const int64_t* counts = nullptr;  // [b] within [0, t], else the nearest; or nullptr: t each
  const int64_t* above = nullptr;   // [b], or nullptr: no token is left out
  const int64_t* first = nullptr;   // [b] index of the first token with logits; with `above`
  int64_t* rest = nullptr;  // [3, b] out: tokens left out, and `counts` and `first` without them
};
POLYSPEC_API Result update_lengths(const LengthsParams& params, Stream stream = Stream::cpu());

// Copies w rows of every batch row, of which row j has the position p = at[b] - less[b] + plus + j
// on one side: out of slot p, or the nearest slot there is; out of slot p % s of a ring; or into
// that slot (`put`). A ring of fewer slots than w keeps the last rows.
struct CopyRowsParams {
  int64_t batch = 0;              // b >= 0
  int64_t width = 0;              // w >= 0
  int64_t slots = 0;              // s >= 1
  int64_t bytes = 0;              // of a row, >= 1
  const int64_t* at = nullptr;    // [b], or nullptr: 0
  const int64_t* less = nullptr;  // [b], or nullptr: 0
  int64_t plus = 0;
  const void* from = nullptr;       // [b, s] rows, or [b, w] of `put`
  int64_t from_stride[2] = {0, 0};  // in bytes
  void* to = nullptr;               // [b, w] rows, or [b, s] of `put`
  int64_t to_stride[2] = {0, 0};
  bool ring = false;
  // With a ring only. A batch row without `part` is left as it is.
  bool put = false;
  const int64_t* part = nullptr;    // [b], or nullptr: all
  const int64_t* skip = nullptr;    // [b] first rows that are left out, or nullptr
  const int64_t* lowest = nullptr;  // [b] positions below it are left out, or nullptr
  int64_t lowest_stride = 1;
  int64_t* begin = nullptr;       // [b] in and out, at most the position of row 0; or nullptr
  int64_t* end = nullptr;         // [b] out: becomes `kept`; or nullptr
  const int64_t* kept = nullptr;  // [b]
};
POLYSPEC_API Result copy_rows(const CopyRowsParams& params, Stream stream = Stream::cpu());

// After a tree has been verified: node i of row b lies in slot lengths[b] + i, and the accepted
// nodes path[b, 0 ... j) move to slots lengths[b] ... lengths[b] + j. A parent comes before its
// children, so path indices strictly increase and no move goes to a higher slot; a thread that
// copies one lane of all j tokens in order therefore needs no second cache. All layers, keys and
// values, in one launch. A path that does not increase or leaves the cache moves nothing:
// kStatusBadPath.
struct CompactTreeParams {
  int64_t layers = 0;        // l >= 0
  int64_t batch = 0;         // b >= 0
  int64_t heads = 0;         // h >= 1
  int64_t capacity = 0;      // c >= 1
  int64_t key_dim = 0;       // d_k >= 1
  int64_t value_dim = 0;     // d_v >= 1
  int32_t element_size = 0;  // 1, 2 or 4 bytes
  // [l] base of each layer's [b, h, c, d_k] and [b, h, c, d_v]; arrays on the device of the call.
  void* const* keys = nullptr;
  void* const* values = nullptr;
  int64_t key_stride[3] = {0, 0, 0};  // of every layer
  int64_t value_stride[3] = {0, 0, 0};
  int32_t alignment = 16;            // bytes that every base is a multiple of; a power of two
  int64_t path_len = 0;              // m >= 0
  const int64_t* lengths = nullptr;  // [b] committed tokens before the tree
  const int64_t* path = nullptr;     // [b, m] accepted nodes, then -1

  // [b] lengths + accepted nodes; may be nullptr, must not be `lengths`.
  int64_t* new_lengths = nullptr;
  int32_t* status = nullptr;  // [b]
};
POLYSPEC_API Result compact_tree(const CompactTreeParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
