// The operators of polyspec/kv_cache.hpp: check what the host can see, then hand over to the
// backend.
#include "polyspec/kv_cache.hpp"

#include <limits>

#include "api/checks.hpp"
#include "cpu/kv_cache.hpp"
#include "cuda/kv_cache.hpp"

namespace polyspec {
namespace {

constexpr int64_t kInt32Limit = int64_t{1} << 31;

bool product_fits(int64_t a, int64_t b, int64_t limit) {
  return a == 0 || b == 0 || a <= limit / b;
}

Result check_elements(int64_t heads, int64_t key_dim, int64_t value_dim, int32_t element_size) {
  if (heads < 1) return invalid("heads must be >= 1");
  if (key_dim < 1 || value_dim < 1 || key_dim >= kInt32Limit / 16 ||
      value_dim >= kInt32Limit / 16) {
    return invalid("key_dim and value_dim must be in [1, 2^27)");
  }
  if (element_size != 1 && element_size != 2 && element_size != 4)
    return invalid("element_size must be 1, 2 or 4");
  return {};
}

Result check_new(const NewTokens& in, const KvCache& keys, const KvCache& values) {
  if (in.batch < 0 || in.tokens < 0) return invalid("batch and tokens must be >= 0");
  const Result elements = check_elements(in.heads, in.key_dim, in.value_dim, in.element_size);
  if (!elements.ok() || in.batch == 0) return elements;
  if (in.lengths == nullptr || in.status == nullptr)
    return invalid("lengths and status must not be null");
  if (in.new_lengths == in.lengths) return invalid("new_lengths must not be lengths");
  if (in.tokens > 0 && (in.keys.data == nullptr || in.values.data == nullptr ||
                        keys.data == nullptr || values.data == nullptr)) {
    return invalid("new and cached keys and values must not be null");
  }
  return {};
}

Result check(const AppendParams& p) {
  if (p.capacity < 1) return invalid("capacity must be >= 1");
  if (p.ring ? p.sinks < 0 || p.sinks >= p.capacity : p.sinks != 0) {
    return invalid("sinks must be in [0, capacity) with a ring, 0 without");
  }
  return check_new(p.in, p.keys, p.values);
}

Result check(const PagedAppendParams& p) {
  if (p.pages < 1 || p.pages >= kInt32Limit) return invalid("pages must be in [1, 2^31)");
  if (p.page_size < 1 || p.max_pages < 0 ||
      !product_fits(p.page_size, p.max_pages, std::numeric_limits<int64_t>::max() / 2)) {
    return invalid("page_size must be >= 1, max_pages >= 0, and their product below 2^62");
  }
  if (p.in.batch > 0 && p.max_pages > 0 && p.block_table == nullptr)
    return invalid("block_table must not be null");
  return check_new(p.in, p.keys, p.values);
}

Result check(const PagesParams& p) {
  if (p.batch < 0 || p.max_pages < 0) return invalid("batch and max_pages must be >= 0");
  if (p.pages < 1 || p.pages >= kInt32Limit) return invalid("pages must be in [1, 2^31)");
  if (p.page_size < 1) return invalid("page_size must be >= 1");
  if (p.batch == 0) return {};
  if (p.max_pages > 0 && p.block_table == nullptr) return invalid("block_table must not be null");
  if (p.lengths == nullptr || p.held == nullptr || p.free_pages == nullptr ||
      p.free_count == nullptr || p.status == nullptr) {
    return invalid("lengths, held, free_pages, free_count and status must not be null");
  }
  return {};
}

Result check(const CompactTreeParams& p) {
  if (p.layers < 0 || p.batch < 0 || p.path_len < 0)
    return invalid("layers, batch and path_len must be >= 0");
  if (p.capacity < 1) return invalid("capacity must be >= 1");
  const Result elements = check_elements(p.heads, p.key_dim, p.value_dim, p.element_size);
  if (!elements.ok()) return elements;
  if (p.alignment < p.element_size || (p.alignment & (p.alignment - 1)) != 0) {
    return invalid("alignment must be a power of two, at least element_size");
  }
  if (p.batch == 0 || p.layers == 0) return {};
  if (p.keys == nullptr || p.values == nullptr || p.lengths == nullptr || p.status == nullptr ||
      (p.path_len > 0 && p.path == nullptr)) {
    return invalid("keys, values, lengths, path and status must not be null");
  }
  if (p.new_lengths == p.lengths) return invalid("new_lengths must not be lengths");
  return {};
}

bool on_cuda(const Stream& stream) { return stream.device == Stream::Device::kCuda; }

}  // namespace

Result append(const AppendParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.in.batch == 0) return result;
  if (on_cuda(stream)) return cuda::append(params, stream.cuda);
  cpu::append(params, stream.executor);
  return {};
}

Result append_paged(const PagedAppendParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.in.batch == 0) return result;
  if (on_cuda(stream)) return cuda::append_paged(params, stream.cuda);
  cpu::append_paged(params, stream.executor);
  return {};
}

Result reserve_pages(const PagesParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (on_cuda(stream)) return cuda::reserve_pages(params, stream.cuda);
  cpu::reserve_pages(params);
  return {};
}

Result truncate_pages(const PagesParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0) return result;
  if (on_cuda(stream)) return cuda::truncate_pages(params, stream.cuda);
  cpu::truncate_pages(params);
  return {};
}

Result compact_tree(const CompactTreeParams& params, Stream stream) {
  const Result result = check(params);
  if (!result.ok() || params.batch == 0 || params.layers == 0) return result;
  if (on_cuda(stream)) return cuda::compact_tree(params, stream.cuda);
  cpu::compact_tree(params, stream.executor);
  return {};
}

}  // namespace polyspec
