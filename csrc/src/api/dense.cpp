// polyspec::dense_*: check arguments on the host, pack, and call the backend for products.
#include "polyspec/dense.hpp"

#include <cstring>
#include <limits>

#include "api/checks.hpp"
#include "api/packed_product.hpp"
#include "cpu/dense_dispatch.hpp"
#include "cpu/dense_layout.hpp"
#include "cpu/isa.hpp"
#include "cuda/dense.hpp"

namespace polyspec {

using core::DenseLayout;

Result check_shape(const DenseShape& shape) {
  if (const Result result = check_matrix(shape.outputs, shape.inputs); !result.ok()) return result;
  if (shape.dtype != DType::kFloat32 && shape.dtype != DType::kBFloat16)
    return expected("dtype", "float32 (0) or bfloat16 (1)", static_cast<int>(shape.dtype));
  const DenseLayout layout(shape);
  if (!product_fits(layout.tiles, layout.tile_bytes,
                    std::numeric_limits<int64_t>::max() - kPackedLabelBytes)) {
    return invalid("outputs, inputs: expected a packed matrix below 2^63 bytes, given [%lld, %lld]",
                   static_cast<long long>(shape.outputs), static_cast<long long>(shape.inputs));
  }
  return {};
}

namespace {

int64_t tiles_bytes(const DenseLayout& layout) { return layout.tiles * layout.tile_bytes; }

PackedLabel label_of(const DenseShape& shape) {
  PackedLabel label;
  label.layout = static_cast<int32_t>(PackedLayout::kDense);
  label.dtype = static_cast<int32_t>(shape.dtype);
  label.outputs = shape.outputs;
  label.inputs = shape.inputs;
  return label;
}

Result check(const DenseProductParams& p, bool on_cuda) {
  if (const Result result = check_shape(p.shape); !result.ok()) return result;
  const int64_t bytes = DenseLayout(p.shape).element_bytes;
  const Result product =
      on_cuda ? check_product_memory(p, bytes, p.shape.outputs * p.shape.inputs * bytes, 0, 1)
              : check_product(p, bytes, label_of(p.shape), dense_packed_bytes(p.shape),
                              dense_workspace_bytes(p.shape, p.tokens));
  if (!product.ok() || p.tokens == 0) return product;
  const Rows y{p.y, p.tokens, p.shape.outputs, p.y_stride, bytes};
  return check_apart("y", y, {{"bias", memory(p.bias, p.shape.outputs * bytes)}});
}

Result product_on_cuda(DenseProductParams p, CUstream_st* stream) {
  p.workspace = nullptr;
  if (const Result result = check(p, true); !result.ok() || p.tokens == 0) return result;
  if (p.tokens == 1) p.x_stride = p.shape.inputs;  // the caller's may be any
  const bool aligned =
      check_aligned("x", p.x, 16).ok() && check_aligned("packed", p.packed, 16).ok();
  if (p.shape.dtype == DType::kBFloat16 && p.tokens <= kDenseTokens && aligned &&
      p.shape.inputs % cuda::kDenseChunk == 0 && p.x_stride % 8 == 0)
    return cuda::dense_product(p, stream);
  Result out = invalid(
      "dense_product: expected on CUDA bfloat16, up to 16 tokens, inputs in multiples of 32, and "
      "x, its stride and weights in multiples of 16 bytes");
  out.code = Result::Code::kUnsupported;
  return out;
}

}  // namespace

int64_t dense_packed_bytes(const DenseShape& shape) {
  if (!check_shape(shape).ok()) return -1;
  return tiles_bytes(DenseLayout(shape)) + kPackedLabelBytes;
}

Result dense_pack(const DensePackParams& params) {
  if (const Result result = check_shape(params.shape); !result.ok()) return result;
  const Result given = check_given({{"weights", params.weights}, {"packed", params.packed}});
  if (!given.ok()) return given;
  if (const Result at = check_aligned("packed", params.packed); !at.ok()) return at;
  const DenseLayout layout(params.shape);
  const int64_t bytes = layout.element_bytes;
  const Rows weights{params.weights, params.shape.outputs, params.shape.inputs,
                     params.weights_stride, bytes};
  if (!weights.apart()) {
    return expected("weights_stride", "at least inputs, and weights below 2^62 bytes",
                    params.weights_stride);
  }
  const Rows out = memory(params.packed, dense_packed_bytes(params.shape));
  if (const Result apart = check_apart("packed", out, {{"weights", weights}}); !apart.ok())
    return apart;
  std::memset(params.packed, 0, static_cast<size_t>(dense_packed_bytes(params.shape)));
  write_label(label_of(params.shape), params.packed);
  auto* const tiles = static_cast<uint8_t*>(at_weights(params).packed);
  for (int64_t n = 0; n < params.shape.outputs; ++n) {
    const uint8_t* from =
        static_cast<const uint8_t*>(params.weights) + n * params.weights_stride * bytes;
    uint8_t* to = tiles + n / kDenseOutputs * layout.tile_bytes + n % kDenseOutputs * 4;
    int64_t left = params.shape.inputs * bytes;
    for (; left > 0; left -= 4, from += 4, to += core::kBlockBytes)
      std::memcpy(to, from, static_cast<size_t>(left < 4 ? left : 4));
  }
  return {};
}

Result dense_packed_check(const DenseShape& shape, const void* packed, int64_t bytes) {
  if (const Result result = check_shape(shape); !result.ok()) return result;
  return check_packed(label_of(shape), packed, bytes, dense_packed_bytes(shape));
}

int64_t dense_workspace_bytes(const DenseShape& shape, int64_t tokens) {
  if (!check_shape(shape).ok() || tokens < 0) return -1;
  return core::dense_workspace(DenseLayout(shape), tokens);
}

Result dense_product(const DenseProductParams& params, Stream stream) {
  if (stream.device == Stream::Device::kCuda) return product_on_cuda(params, stream.cuda);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  if (const Result result = check(params, false); !result.ok()) return result;
  cpu::dense_product(at_weights(params), stream.executor);
  return {};
}

}  // namespace polyspec
