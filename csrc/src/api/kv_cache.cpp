// The operators of polyspec/kv_cache.hpp: check arguments on the host, then call the backend.
#include "polyspec/kv_cache.hpp"

#include <algorithm>
#include <limits>

#include "api/checks.hpp"
#include "core/kv_index.hpp"
#include "cpu/kv_cache.hpp"
#include "cuda/kv_cache.hpp"

namespace polyspec {
namespace {

constexpr int64_t kInt32Limit = int64_t{1} << 31;

Result check_elements(int64_t heads, int64_t key_dim, int64_t value_dim, int32_t element_size) {
  if (heads < 1) return expected("heads", ">= 1", heads);
  if (key_dim < 1 || key_dim >= kInt32Limit / 16) return expected("key_dim", "[1, 2^27)", key_dim);
  if (value_dim < 1 || value_dim >= kInt32Limit / 16)
    return expected("value_dim", "[1, 2^27)", value_dim);
  if (element_size != 1 && element_size != 2 && element_size != 4)
    return expected("element_size", "1, 2 or 4", element_size);
  return {};
}

Result same_lengths() {
  return invalid("new_lengths: expected memory apart from all else, given lengths");
}

Result check_pages(int64_t batch, int64_t pages, int64_t page_size, int64_t max_pages) {
  if (pages < 1 || pages >= kInt32Limit) return expected("pages", "[1, 2^31)", pages);
  if (page_size < 1) return expected("page_size", ">= 1", page_size);
  if (max_pages < 0) return expected("max_pages", ">= 0", max_pages);
  return check_sizes("batch, max_pages", {batch, max_pages});
}

Result check_new(const NewTokens& in, const KvCache& keys, const KvCache& values) {
  if (in.batch < 0) return expected("batch", ">= 0", in.batch);
  if (in.tokens < 0) return expected("tokens", ">= 0", in.tokens);
  const Result elements = check_elements(in.heads, in.key_dim, in.value_dim, in.element_size);
  if (!elements.ok()) return elements;
  const Result sizes =
      check_sizes("batch, heads, tokens, key_dim, value_dim",
                  {in.batch, in.heads, in.tokens, std::max(in.key_dim, in.value_dim)});
  if (!sizes.ok() || in.batch == 0) return sizes;
  if (in.new_lengths != nullptr && in.new_lengths == in.lengths) return same_lengths();
  const bool reads = in.tokens > 0;
  return check_given({{"lengths", in.lengths},
                      {"status", in.status},
                      {"new keys", in.keys.data, reads},
                      {"new values", in.values.data, reads},
                      {"cached keys", keys.data, reads},
                      {"cached values", values.data, reads}});
}

Result check(const AppendParams& p) {
  if (p.capacity < 1) return expected("capacity", ">= 1", p.capacity);
  if (p.ring ? p.sinks < 0 || p.sinks >= p.capacity : p.sinks != 0)
    return expected("sinks", "[0, capacity) with a ring, 0 without", p.sinks);
  return check_new(p.in, p.keys, p.values);
}

Result check(const PagedAppendParams& p) {
  const Result pages = check_pages(p.in.batch, p.pages, p.page_size, p.max_pages);
  if (!pages.ok()) return pages;
  if (!product_fits(p.page_size, p.max_pages, std::numeric_limits<int64_t>::max() / 2))
    return expected("max_pages", "below 2^62 tokens in all", p.max_pages);
  const Result table =
      check_given({{"block_table", p.block_table, p.in.batch > 0 && p.max_pages > 0}});
  if (!table.ok()) return table;
  return check_new(p.in, p.keys, p.values);
}

Result check(const PagesParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  const Result pages = check_pages(p.batch, p.pages, p.page_size, p.max_pages);
  if (!pages.ok() || p.batch == 0) return pages;
  return check_given({{"block_table", p.block_table, p.max_pages > 0},
                      {"lengths", p.lengths},
                      {"held", p.held},
                      {"free_pages", p.free_pages},
                      {"free_count", p.free_count},
                      {"status", p.status}});
}

Result check(const LengthsParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  const bool left_out = p.batch > 0 && p.above != nullptr;
  return check_given({{"lengths", p.lengths, p.batch > 0},
                      {"first", p.first, left_out},
                      {"rest", p.rest, left_out}});
}

Result check(const CopyRowsParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.width < 0) return expected("width", ">= 0", p.width);
  if (p.slots < 1) return expected("slots", ">= 1", p.slots);
  if (p.bytes < 1) return expected("bytes", ">= 1", p.bytes);
  if (p.put && !p.ring) return invalid("put: expected a ring, given none");
  const Result sizes =
      check_sizes("batch, width, slots, bytes", {p.batch, std::max(p.width, p.slots), p.bytes});
  if (!sizes.ok() || p.batch == 0) return sizes;
  return check_given({{"from", p.from, p.width > 0},
                      {"to", p.to, p.width > 0},
                      {"kept", p.kept, p.end != nullptr}});
}

Result check(const CompactTreeParams& p) {
  if (p.layers < 0) return expected("layers", ">= 0", p.layers);
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.path_len < 0) return expected("path_len", ">= 0", p.path_len);
  if (p.capacity < 1) return expected("capacity", ">= 1", p.capacity);
  const Result elements = check_elements(p.heads, p.key_dim, p.value_dim, p.element_size);
  if (!elements.ok()) return elements;
  if (p.alignment < p.element_size || (p.alignment & (p.alignment - 1)) != 0)
    return expected("alignment", "a power of two, at least element_size", p.alignment);
  const Result moved =
      check_sizes("layers, batch, heads, path_len, key_dim, value_dim",
                  {p.layers, p.batch, p.heads, p.path_len, std::max(p.key_dim, p.value_dim)});
  if (!moved.ok()) return moved;
  if (p.batch == 0 || p.layers == 0) return {};
  if (p.new_lengths != nullptr && p.new_lengths == p.lengths) return same_lengths();
  return check_given({{"keys", p.keys},
                      {"values", p.values},
                      {"lengths", p.lengths},
                      {"path", p.path, p.path_len > 0},
                      {"status", p.status}});
}

void fill_new(NewTokens* in) {
  fill_strides({in->heads, in->tokens, in->key_dim}, in->keys.stride);
  fill_strides({in->heads, in->tokens, in->value_dim}, in->values.stride);
}

bool on_cuda(const Stream& stream) { return stream.device == Stream::Device::kCuda; }

}  // namespace

Result append(const AppendParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.in.batch == 0) return result;
  AppendParams params = given;
  fill_new(&params.in);
  fill_strides({params.in.heads, params.capacity, params.in.key_dim}, params.keys.stride);
  fill_strides({params.in.heads, params.capacity, params.in.value_dim}, params.values.stride);
  if (on_cuda(stream)) return cuda::append(params, stream.cuda);
  cpu::append(params, stream.executor);
  return {};
}

Result append_paged(const PagedAppendParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.in.batch == 0) return result;
  PagedAppendParams params = given;
  fill_new(&params.in);
  fill_strides({params.in.heads, params.page_size, params.in.key_dim}, params.keys.stride);
  fill_strides({params.in.heads, params.page_size, params.in.value_dim}, params.values.stride);
  fill_strides({params.max_pages}, &params.block_table_stride);
  if (on_cuda(stream)) return cuda::append_paged(params, stream.cuda);
  cpu::append_paged(params, stream.executor);
  return {};
}

Result reserve_pages(const PagesParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0) return result;
  PagesParams params = given;
  fill_strides({params.max_pages}, &params.block_table_stride);
  if (on_cuda(stream)) return cuda::reserve_pages(params, stream.cuda);
  cpu::reserve_pages(params);
  return {};
}

Result truncate_pages(const PagesParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0) return result;
  PagesParams params = given;
  fill_strides({params.max_pages}, &params.block_table_stride);
  if (on_cuda(stream)) return cuda::truncate_pages(params, stream.cuda);
  cpu::truncate_pages(params);
  return {};
}

Result update_lengths(const LengthsParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (on_cuda(stream)) return cuda::update_lengths(params, stream.cuda);
  for (int64_t row = 0; row < params.batch; ++row) core::update_length(params, row);
  return {};
}

Result copy_rows(const CopyRowsParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (on_cuda(stream)) return cuda::copy_rows(params, stream.cuda);
  cpu::copy_rows(params, stream.executor);
  return {};
}

Result compact_tree(const CompactTreeParams& given, Stream stream) {
  const Result result = check(given);
  if (!result.ok() || given.batch == 0 || given.layers == 0) return result;
  CompactTreeParams params = given;
  fill_strides({params.heads, params.capacity, params.key_dim}, params.key_stride);
  fill_strides({params.heads, params.capacity, params.value_dim}, params.value_stride);
  if (on_cuda(stream)) return cuda::compact_tree(params, stream.cuda);
  cpu::compact_tree(params, stream.executor);
  return {};
}

}  // namespace polyspec
