// polyspec::bfloat16_*: check what the host can see, pack, and hand products over to the backend.
#include "polyspec/bfloat16.hpp"

#include <cstring>

#include "cpu/bfloat16_dispatch.hpp"
#include "cpu/bfloat16_layout.hpp"

namespace polyspec {
namespace {

using core::BFloat16Layout;

Result invalid(const char* message) { return {Result::Code::kInvalidArgument, message}; }

bool aligned(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 63) == 0; }

Result check(const BFloat16Shape& shape) {
  if (shape.outputs < 1 || shape.outputs >= int64_t{1} << 31)
    return invalid("outputs must be in [1, 2^31)");
  if (shape.inputs < 1 || shape.inputs >= int64_t{1} << 31)
    return invalid("inputs must be in [1, 2^31)");
  return {};
}

Result check(const BFloat16ProductParams& p) {
  if (const Result result = check(p.shape); !result.ok()) return result;
  if (p.tokens < 0) return invalid("tokens must be >= 0");
  if (p.tokens == 0) return {};
  if (p.x == nullptr || p.packed == nullptr || p.y == nullptr || p.workspace == nullptr)
    return invalid("x, packed, y and workspace must not be null");
  if (!aligned(p.packed) || !aligned(p.workspace))
    return invalid("packed and workspace must be 64-byte aligned");
  return {};
}

}  // namespace

int64_t bfloat16_packed_bytes(const BFloat16Shape& shape) {
  if (!check(shape).ok()) return -1;
  const BFloat16Layout layout(shape);
  return layout.tiles * layout.tile_bytes;
}

Result bfloat16_pack(const BFloat16PackParams& params) {
  if (const Result result = check(params.shape); !result.ok()) return result;
  if (params.weights == nullptr || params.packed == nullptr)
    return invalid("weights and packed must not be null");
  if (!aligned(params.packed)) return invalid("packed must be 64-byte aligned");
  const BFloat16Layout layout(params.shape);
  const int64_t inputs = params.shape.inputs;
  auto* packed = static_cast<uint16_t*>(params.packed);
  std::memset(packed, 0, static_cast<size_t>(bfloat16_packed_bytes(params.shape)));
  for (int64_t n = 0; n < params.shape.outputs; ++n) {
    const auto* from = static_cast<const uint16_t*>(params.weights) + n * params.weights_stride;
    uint16_t* to = packed + n / kBFloat16Outputs * layout.tile_bytes / 2 + n % kBFloat16Outputs * 2;
    for (int64_t k = 0; k < inputs; ++k) to[k / 2 * kBFloat16Outputs * 2 + k % 2] = from[k];
  }
  return {};
}

int64_t bfloat16_workspace_bytes(const BFloat16Shape& shape, int64_t tokens) {
  if (!check(shape).ok() || tokens < 0) return -1;
  return core::bfloat16_workspace(BFloat16Layout(shape), tokens);
}

Result bfloat16_product(const BFloat16ProductParams& params, Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu)
    return {Result::Code::kUnsupported, "bfloat16_product runs on the CPU only"};
  cpu::bfloat16_product(params, stream.executor);
  return {};
}

const char* bfloat16_isa() { return cpu::bfloat16().isa; }

}  // namespace polyspec
