// polyspec::attention: checks what the host can see, and hands over to the backend.
#include "polyspec/attention.hpp"

#include "api/checks.hpp"
#include "cpu/attention_dispatch.hpp"

namespace polyspec {
namespace {

bool is_width(int64_t width) {
  return width >= 1 && width <= kAttentionWidth && width % kAttentionStep == 0;
}

Result check(const AttentionParams& p) {
  if (p.batch < 0 || p.tokens < 0) return invalid("batch and tokens must be >= 0");
  if (p.heads < 1 || p.groups < 1 || p.heads % p.groups != 0)
    return invalid("heads must be a positive multiple of groups");
  if (p.length < 1) return invalid("length must be >= 1");
  if (!is_width(p.width) || !is_width(p.value_width))
    return invalid("width and value_width must be multiples of 32 in [32, 256]");
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16)
    return invalid("dtype must be kFloat32 or kBFloat16");
  if (p.batch * p.tokens == 0) return {};
  if (p.query == nullptr || p.key == nullptr || p.value == nullptr || p.out == nullptr)
    return invalid("query, key, value and out must not be null");
  return {};
}

}  // namespace

Result attention(const AttentionParams& params, Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu)
    return {Result::Code::kUnsupported, "attention runs on the CPU only"};
  if (params.batch * params.tokens > 0) cpu::attention(params, stream.executor);
  return {};
}

}  // namespace polyspec
