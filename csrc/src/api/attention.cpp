// polyspec::attention: checks arguments on the host, then calls the backend.
#include "polyspec/attention.hpp"

#include <algorithm>

#include "api/checks.hpp"
#include "core/layer_math.hpp"
#include "cpu/attention_dispatch.hpp"
#include "cpu/isa.hpp"
#include "cuda/attention.hpp"

namespace polyspec {
namespace {

bool is_width(int64_t width) {
  return width >= 1 && width <= kAttentionWidth && width % kAttentionStep == 0;
}

Result check(const AttentionParams& p) {
  if (const Result result = check_shape(p); !result.ok()) return result;
  if (p.batch * p.tokens == 0) return {};
  if (const Result at = check_aligned("workspace", p.workspace); !at.ok()) return at;
  return check_given({{"query", p.query}, {"key", p.key}, {"value", p.value}, {"out", p.out}});
}

// Rows of keys and of values are read 16 bytes at a time.
Result check_rows(const char* name, const void* data, const int64_t (&stride)[3], int64_t size) {
  uint64_t bits = reinterpret_cast<uintptr_t>(data);
  for (const int64_t one : stride) bits |= static_cast<uint64_t>(one * size);
  if (bits % 16 == 0) return {};
  return invalid("%s: expected rows at multiples of 16 bytes on CUDA, given others", name);
}

Result check_for_cuda(const AttentionParams& p) {
  if (p.batch * p.tokens == 0) return {};
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  if (const Result key = check_rows("key", p.key, p.key_stride, size); !key.ok()) return key;
  if (const Result value = check_rows("value", p.value, p.value_stride, size); !value.ok())
    return value;
  return check_given({{"workspace", p.workspace, p.length > kAttentionSpan}});
}

}  // namespace

Result check_shape(const AttentionParams& p) {
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (p.tokens < 0) return expected("tokens", ">= 0", p.tokens);
  if (p.groups < 1) return expected("groups", ">= 1", p.groups);
  if (p.heads < 1 || p.heads % p.groups != 0) {
    return invalid("heads: expected a positive multiple of groups, %lld, given %lld",
                   static_cast<long long>(p.groups), static_cast<long long>(p.heads));
  }
  if (p.length < 1) return expected("length", ">= 1", p.length);
  if (p.causal && p.lengths != nullptr)
    return invalid("lengths: expected none where causal, given some");
  if (p.causal && p.length < p.tokens) {
    return invalid("length: expected at least tokens, %lld, where causal, given %lld",
                   static_cast<long long>(p.tokens), static_cast<long long>(p.length));
  }
  const char* const widths = "a multiple of 32 in [32, 256]";
  if (!is_width(p.width)) return expected("width", widths, p.width);
  if (!is_width(p.value_width)) return expected("value_width", widths, p.value_width);
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16)
    return expected("dtype", "float32 (0) or bfloat16 (1)", static_cast<int>(p.dtype));
  const Result keys = check_sizes("batch, groups, length, width",
                                  {p.batch, p.groups, p.length, std::max(p.width, p.value_width)});
  if (!keys.ok()) return keys;
  // Of the workspace, which has more than the queries and `out`.
  return check_sizes("batch, heads, tokens, length, value_width",
                     {p.batch, p.heads, p.tokens, core::attention_spans(p.length),
                      std::max(p.width, core::attention_kept(p.value_width))});
}

int64_t attention_workspace_bytes(const AttentionParams& params) {
  return check_shape(params).ok() ? cpu::attention_workspace_bytes(params) : -1;
}

Result attention(const AttentionParams& given, Stream stream) {
  if (const Result result = check(given); !result.ok()) return result;
  AttentionParams params = given;
  fill_strides({params.heads, params.tokens, params.width}, params.query_stride);
  fill_strides({params.groups, params.length, params.width}, params.key_stride);
  fill_strides({params.groups, params.length, params.value_width}, params.value_stride);
  if (stream.device == Stream::Device::kCuda) {
    if (const Result result = check_for_cuda(params); !result.ok()) return result;
    return params.batch * params.tokens > 0 ? cuda::attention(params, stream.cuda) : Result{};
  }
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  if (params.batch * params.tokens > 0) cpu::attention(params, stream.executor);
  return {};
}

}  // namespace polyspec
