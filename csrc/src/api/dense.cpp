// polyspec::dense_*: check what the host can see, pack, and hand products over to the backend.
#include "polyspec/dense.hpp"

#include <cstring>

#include "api/checks.hpp"
#include "cpu/dense_dispatch.hpp"
#include "cpu/dense_layout.hpp"

namespace polyspec {
namespace {

using core::DenseLayout;

Result check(const DenseShape& shape) {
  if (const Result result = check_matrix(shape.outputs, shape.inputs); !result.ok()) return result;
  if (shape.dtype != DType::kFloat32 && shape.dtype != DType::kBFloat16)
    return invalid("dtype must be kFloat32 or kBFloat16");
  return {};
}

Result check(const DenseProductParams& p) {
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

int64_t dense_packed_bytes(const DenseShape& shape) {
  if (!check(shape).ok()) return -1;
  const DenseLayout layout(shape);
  return layout.tiles * layout.tile_bytes;
}

Result dense_pack(const DensePackParams& params) {
  if (const Result result = check(params.shape); !result.ok()) return result;
  if (params.weights == nullptr || params.packed == nullptr)
    return invalid("weights and packed must not be null");
  if (!aligned(params.packed)) return invalid("packed must be 64-byte aligned");
  const DenseLayout layout(params.shape);
  const int64_t bytes = layout.element_bytes;
  auto* packed = static_cast<uint8_t*>(params.packed);
  std::memset(packed, 0, static_cast<size_t>(dense_packed_bytes(params.shape)));
  for (int64_t n = 0; n < params.shape.outputs; ++n) {
    const uint8_t* from =
        static_cast<const uint8_t*>(params.weights) + n * params.weights_stride * bytes;
    uint8_t* to = packed + n / kDenseOutputs * layout.tile_bytes + n % kDenseOutputs * 4;
    int64_t left = params.shape.inputs * bytes;
    for (; left > 0; left -= 4, from += 4, to += core::kBlockBytes)
      std::memcpy(to, from, static_cast<size_t>(left < 4 ? left : 4));
  }
  return {};
}

int64_t dense_workspace_bytes(const DenseShape& shape, int64_t tokens) {
  if (!check(shape).ok() || tokens < 0) return -1;
  return core::dense_workspace(DenseLayout(shape), tokens);
}

Result dense_product(const DenseProductParams& params, Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu)
    return {Result::Code::kUnsupported, "dense_product runs on the CPU only"};
  cpu::dense_product(params, stream.executor);
  return {};
}

const char* dense_isa() { return cpu::dense().isa; }

}  // namespace polyspec
