// The cache operators on the CPU: one task per (row, head), whole vectors at a time, the index
// arithmetic of kv_index.hpp.
#include "cpu/kv_cache.hpp"

#include <cstring>

#include "core/kv_index.hpp"
#include "core/kv_pages.hpp"
#include "cpu/serial_group.hpp"

namespace polyspec::cpu {
namespace {

// Runs body(params, i) for i in [0, n), on the caller's threads.
template <class Params>
void run(void (*body)(const Params&, int64_t), const Params& params, int64_t n,
         const Executor& executor) {
  if (executor.run == nullptr || n <= 1) {
    for (int64_t i = 0; i < n; ++i) body(params, i);
    return;
  }
  struct Call {
    void (*body)(const Params&, int64_t);
    const Params* params;
  } call{body, &params};
  executor.run(
      executor.pool, n,
      [](void* context, int64_t i) {
        const Call& mine = *static_cast<const Call*>(context);
        mine.body(*mine.params, i);
      },
      &call);
}

// Bytes of a vector, and the first byte of one (row, head).
struct Side {
  const char* from;
  int64_t from_step;
  const KvCache* to;
  int64_t bytes;
};

Side side_of(const NewTokens& in, const KvSource& source, const KvCache& cache, int64_t dim,
             int64_t row, int64_t head) {
  const char* from = static_cast<const char*>(source.data) +
                     (row * source.stride[0] + head * source.stride[1]) * in.element_size;
  return {from, source.stride[2] * in.element_size, &cache, dim * in.element_size};
}

void copy(const Side& side, int32_t element_size, int64_t token, int64_t cache_row, int64_t head,
          int64_t slot) {
  char* to = static_cast<char*>(side.to->data) +
             core::offset_of(side.to->stride, cache_row, head, slot) * element_size;
  std::memcpy(to, side.from + token * side.from_step, static_cast<size_t>(side.bytes));
}

void append_one(const AppendParams& p, int64_t index) {
  const NewTokens& in = p.in;
  const int64_t row = index / in.heads;
  const int64_t head = index % in.heads;
  const core::RowAppend plan = core::row_append(in, row, core::append_limit(p));
  if (head == 0) core::finish_row(in, row, plan);
  const Side keys = side_of(in, in.keys, p.keys, in.key_dim, row, head);
  const Side values = side_of(in, in.values, p.values, in.value_dim, row, head);
  for (int64_t token = 0; token < plan.count; ++token) {
    const int64_t slot = core::append_slot(p, plan, plan.begin + token);
    if (slot < 0) continue;
    copy(keys, in.element_size, token, row, head, slot);
    copy(values, in.element_size, token, row, head, slot);
  }
}

void append_paged_one(const PagedAppendParams& p, int64_t index) {
  const NewTokens& in = p.in;
  const int64_t row = index / in.heads;
  const int64_t head = index % in.heads;
  const core::RowAppend plan = core::row_append_paged(p, row);
  if (head == 0) core::finish_row(in, row, core::checked_pages(p, row, plan));
  const Side keys = side_of(in, in.keys, p.keys, in.key_dim, row, head);
  const Side values = side_of(in, in.values, p.values, in.value_dim, row, head);
  for (int64_t token = 0; token < plan.count; ++token) {
    const int64_t position = plan.begin + token;
    const int64_t page = core::page_of(p, row, position);
    if (page < 0) continue;
    copy(keys, in.element_size, token, page, head, position % p.page_size);
    copy(values, in.element_size, token, page, head, position % p.page_size);
  }
}

// The accepted vectors of one (layer, row, head), in order: no move overwrites the source of a
// later move.
void move_path(void* base, const int64_t (&stride)[3], int64_t dim, int32_t element_size,
               const core::RowPath& path, int64_t row, int64_t head) {
  char* first =
      static_cast<char*>(base) + core::offset_of(stride, row, head, path.begin) * element_size;
  const int64_t step = stride[2] * element_size;
  for (int64_t j = 0; j < path.count; ++j) {
    if (path.nodes[j] == j) continue;
    std::memcpy(first + j * step, first + path.nodes[j] * step,
                static_cast<size_t>(dim * element_size));
  }
}

void compact_one(const CompactTreeParams& p, int64_t index) {
  const int64_t head = index % p.heads;
  const int64_t row = index / p.heads % p.batch;
  const int64_t layer = index / p.heads / p.batch;
  const core::RowPath path = core::row_path(p, row);
  if (layer == 0 && head == 0) core::finish_path(p, row, path);
  move_path(p.keys[layer], p.key_stride, p.key_dim, p.element_size, path, row, head);
  move_path(p.values[layer], p.value_stride, p.value_dim, p.element_size, path, row, head);
}

void copy_rows_one(const CopyRowsParams& p, int64_t row) {
  if (!core::has_part(p, row)) return;
  core::finish_window(p, row);
  for (int64_t j = 0; j < p.width; ++j) {
    const int64_t slot = core::slot_of(p, row, j);
    if (slot < 0) continue;
    std::memcpy(core::target_of(p, row, j, slot), core::source_of(p, row, j, slot),
                static_cast<size_t>(p.bytes));
  }
}

}  // namespace

void append(const AppendParams& params, const Executor& executor) {
  run(append_one, params, params.in.batch * params.in.heads, executor);
}

void append_paged(const PagedAppendParams& params, const Executor& executor) {
  run(append_paged_one, params, params.in.batch * params.in.heads, executor);
}

void copy_rows(const CopyRowsParams& params, const Executor& executor) {
  run(copy_rows_one, params, params.batch, executor);
}

void reserve_pages(const PagesParams& params) {
  core::Scratch scratch;
  core::SerialGroup group(scratch);
  core::move_pages<true>(group, params);
}

void truncate_pages(const PagesParams& params) {
  core::Scratch scratch;
  core::SerialGroup group(scratch);
  core::move_pages<false>(group, params);
}

void compact_tree(const CompactTreeParams& params, const Executor& executor) {
  run(compact_one, params, params.layers * params.batch * params.heads, executor);
}

}  // namespace polyspec::cpu
