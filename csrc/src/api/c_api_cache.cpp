// The C interface of caches of keys and values: struct sizes and codes; nothing is computed here.
#include "api/c_calls.hpp"
#include "api/c_fields.hpp"
#include "polyspec/kv_cache.hpp"

namespace {

using polyspec::c_api::call;
using polyspec::c_api::read_struct;

// clang-format off
#define NEW_TOKENS(F)                                                         \
  F(batch) F(heads) F(tokens) F(key_dim) F(value_dim) F(element_size) F(keys) \
  F(values) F(lengths) F(counts) F(new_lengths) F(status)
// clang-format on
POLYSPEC_COPY(polyspec_new_tokens, NewTokens, 1, NEW_TOKENS)
#define APPEND(F) F(capacity) F(ring) F(sinks) F(keys) F(values)
POLYSPEC_COPY(polyspec_append_params, AppendParams, 2, APPEND)
// clang-format off
#define APPEND_PAGED(F)                                               \
  F(pages) F(page_size) F(max_pages) F(keys) F(values) F(block_table) \
  F(block_table_stride)
// clang-format on
POLYSPEC_COPY(polyspec_paged_append_params, PagedAppendParams, 2, APPEND_PAGED)
// clang-format off
#define PAGES(F)                                                        \
  F(batch) F(pages) F(page_size) F(max_pages) F(lengths) F(block_table) \
  F(block_table_stride) F(held) F(free_pages) F(free_count) F(status)
// clang-format on
POLYSPEC_COPY(polyspec_pages_params, PagesParams, 1, PAGES)
// clang-format off
#define COMPACT_TREE(F)                                                               \
  F(layers) F(batch) F(heads) F(capacity) F(key_dim) F(value_dim) F(element_size)     \
  F(keys) F(values) F(key_stride) F(value_stride) F(alignment) F(path_len) F(lengths) \
  F(path) F(new_lengths) F(status)
// clang-format on
POLYSPEC_COPY(polyspec_compact_tree_params, CompactTreeParams, 1, COMPACT_TREE)

static_assert(POLYSPEC_STATUS_CACHE_FULL == int{polyspec::kStatusCacheFull}, "status");
static_assert(POLYSPEC_STATUS_BAD_PAGE == int{polyspec::kStatusBadPage}, "status");
static_assert(POLYSPEC_STATUS_BAD_PATH == int{polyspec::kStatusBadPath}, "status");

constexpr auto read_append = [](const char* function, const auto& in, auto* to) {
  polyspec_new_tokens tokens = polyspec_new_tokens_default();
  const polyspec_code code = read_struct(function, in.in, {}, &tokens);
  if (code != POLYSPEC_OK) return code;
  copy(tokens, &to->in);
  copy(in, to);
  return polyspec_code{POLYSPEC_OK};
};

constexpr auto read_alone = [](const char*, const auto& in, auto* to) {
  copy(in, to);
  return polyspec_code{POLYSPEC_OK};
};

}  // namespace

polyspec_code polyspec_append(const polyspec_append_params* params, const polyspec_stream* stream) {
  return call(__func__, &polyspec::append, params, polyspec_append_params_default(), {}, stream,
              read_append);
}

polyspec_code polyspec_append_paged(const polyspec_paged_append_params* params,
                                    const polyspec_stream* stream) {
  return call(__func__, &polyspec::append_paged, params, polyspec_paged_append_params_default(), {},
              stream, read_append);
}

polyspec_code polyspec_reserve_pages(const polyspec_pages_params* params,
                                     const polyspec_stream* stream) {
  return call(__func__, &polyspec::reserve_pages, params, polyspec_pages_params_default(), {},
              stream, read_alone);
}

polyspec_code polyspec_truncate_pages(const polyspec_pages_params* params,
                                      const polyspec_stream* stream) {
  return call(__func__, &polyspec::truncate_pages, params, polyspec_pages_params_default(), {},
              stream, read_alone);
}

polyspec_code polyspec_compact_tree(const polyspec_compact_tree_params* params,
                                    const polyspec_stream* stream) {
  return call(__func__, &polyspec::compact_tree, params, polyspec_compact_tree_params_default(), {},
              stream, read_alone);
}
