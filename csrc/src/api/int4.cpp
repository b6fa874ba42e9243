// polyspec::int4_*: check arguments on the host, pack and unpack, and call the backends.
#include "polyspec/int4.hpp"

#include <cstring>

#include "api/checks.hpp"
#include "api/packed_product.hpp"
#include "core/int4_tiles.hpp"
#include "core/row.hpp"
#include "cpu/int4_dispatch.hpp"
#include "cpu/int4_layout.hpp"
#include "cpu/int4_round.hpp"
#include "cpu/isa.hpp"
#include "cuda/int4.hpp"

namespace polyspec {

using core::BFloat16;
using core::Int4Layout;

Result check_shape(const Int4Shape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128 && shape.group != 256)
    return expected("group", "32, 64, 128 or 256", shape.group);
  if (const Result result = check_matrix(shape.outputs, shape.inputs); !result.ok()) return result;
  if (shape.inputs % shape.group != 0) {
    return invalid("inputs: expected a multiple of group, %d, given %lld", shape.group,
                   static_cast<long long>(shape.inputs));
  }
  if (shape.scale_dtype != DType::kFloat32 && shape.scale_dtype != DType::kBFloat16) {
    return expected("scale_dtype", "float32 (0) or bfloat16 (1)",
                    static_cast<int>(shape.scale_dtype));
  }
  return {};
}

namespace {

int64_t tiles_bytes(const Int4Layout& layout) { return layout.tiles * layout.tile_bytes; }

PackedLabel label_of(const Int4Shape& shape) {
  PackedLabel label;
  label.layout = static_cast<int32_t>(PackedLayout::kInt4);
  label.dtype = static_cast<int32_t>(shape.scale_dtype);
  label.group = shape.group;
  label.outputs = shape.outputs;
  label.inputs = shape.inputs;
  return label;
}

Result check(const Int4RoundParams& p) {
  if (const Result result = check_shape(p.shape); !result.ok()) return result;
  if (const Result dtype = check_dtype("dtype", p.dtype); !dtype.ok()) return dtype;
  return check_given(
      {{"weights", p.weights}, {"values", p.values}, {"scales", p.scales}, {"zeros", p.zeros}});
}

Result check_on_cuda(const Int4Shape& shape) {
  if (const Result result = check_shape(shape); !result.ok()) return result;
  if (shape.scale_dtype == DType::kBFloat16) return {};
  return expected("scale_dtype", "bfloat16 (1) on CUDA", static_cast<int>(shape.scale_dtype));
}

int64_t tiles_bytes(const core::Int4Tiles& layout) { return layout.tiles * layout.tile_bytes; }

Result check_on_cuda(const cuda::Int4Product& given) {
  if (const Result result = check_on_cuda(given.shape); !result.ok()) return result;
  Int4ProductParams p = given;
  if (given.gated) p.shape.outputs /= 2;  // of y
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return expected("dtype", "bfloat16 (1) or float16 (2) on CUDA", static_cast<int>(p.dtype));
  const Result memory =
      check_product_memory(p, 2, tiles_bytes(core::Int4Tiles(given.shape)), 0, 16);
  if (!memory.ok() || p.tokens == 0) return memory;
  if (const Result at = check_aligned("x", p.x, 16); !at.ok()) return at;
  if (p.tokens > 1 && p.x_stride % 8 != 0)
    return expected("x_stride", "a multiple of 8 on CUDA", p.x_stride);
  if ((p.norm != nullptr || p.residual != nullptr) && p.dtype != DType::kBFloat16)
    return expected("dtype", "bfloat16 (1) with a norm or a residual", static_cast<int>(p.dtype));
  if (p.residual != nullptr && given.gated)
    return invalid("residual: expected none of a gated product");
  if (p.norm == nullptr) return {};
  if (!(p.epsilon > 0.0f)) return invalid("epsilon: expected > 0, given %g", double(p.epsilon));
  if (p.tokens > 1 && p.x_stride != p.shape.inputs)
    return expected("x_stride", "the inputs, with a norm", p.x_stride);
  if (const Result one = check_given({{"normed", p.normed}}); !one.ok()) return one;
  for (const Named& one : {Named{"norm", p.norm}, Named{"normed", p.normed}}) {
    if (const Result at = check_aligned(one.name, one.pointer, 16); !at.ok()) return at;
  }
  return {};
}

// Of pack and unpack.
template <class Params>
Result check_both(const Params& p, uintptr_t alignment = 64) {
  if (const Result result = check_shape(p.shape); !result.ok()) return result;
  const Result given = check_given(
      {{"values", p.values}, {"scales", p.scales}, {"zeros", p.zeros}, {"packed", p.packed}});
  return given.ok() ? check_aligned("packed", p.packed, alignment) : given;
}

Result check(const Int4ProductParams& p) {
  if (const Result result = check_shape(p.shape); !result.ok()) return result;
  if (const Result dtype = check_dtype("dtype", p.dtype); !dtype.ok()) return dtype;
  return check_product(p, p.dtype == DType::kFloat32 ? 4 : 2, label_of(p.shape),
                       int4_packed_bytes(p.shape), int4_workspace_bytes(p.shape, p.tokens));
}

void write_scale(uint8_t* to, int64_t lane, float value, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to + 4 * lane, &value, 4);
    return;
  }
  const uint32_t bits = core::bit_cast<uint32_t>(value);
  const uint16_t half = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  std::memcpy(to + 2 * lane, &half, 2);
}

float read_scale(const uint8_t* from, int64_t lane, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * lane, 4);
    return value;
  }
  BFloat16 half;
  std::memcpy(&half, from + 2 * lane, 2);
  return core::to_float(half);
}

// body(row, group, lane, head of the group in packed) for every row and group of the matrix.
template <class Byte, class Body>
void over_groups(const Int4Shape& shape, Byte* packed, const Body& body) {
  const Int4Layout layout(shape);
  for (int64_t row = 0; row < shape.outputs; ++row) {
    Byte* tile = packed + row / kInt4Outputs * layout.tile_bytes;
    for (int64_t group = 0; group < layout.groups; ++group)
      body(row, group, row % kInt4Outputs, tile + group * layout.group_bytes);
  }
}

}  // namespace

int64_t int4_packed_bytes(const Int4Shape& shape) {
  if (!check_shape(shape).ok()) return -1;
  return tiles_bytes(Int4Layout(shape)) + kPackedLabelBytes;
}

Result int4_round(const Int4RoundParams& given, Stream stream) {
  if (const Result result = check(given); !result.ok()) return result;
  Int4RoundParams params = given;
  fill_strides({params.shape.inputs}, &params.stride);
  if (stream.device != Stream::Device::kCpu) return on_cpu_only("int4_round");
  if (!cpu::int4_round(params, stream.executor))
    return invalid("weights: expected finite numbers, given one that is not or makes a scale so");
  return {};
}

Result int4_pack(const Int4PackParams& params) {
  if (const Result result = check_both(params); !result.ok()) return result;
  const int64_t count = params.shape.outputs * params.shape.inputs;
  uint8_t all = 0;
  for (int64_t i = 0; i < count; ++i) all |= params.values[i];
  for (int64_t i = 0; all > 15 && i < count; ++i) {
    if (params.values[i] > 15) return expected("values", "numbers in [0, 16)", params.values[i]);
  }
  const Int4Layout layout(params.shape);
  std::memset(params.packed, 0, static_cast<size_t>(int4_packed_bytes(params.shape)));
  write_label(label_of(params.shape), params.packed);
  over_groups(params.shape, at_weights(params).packed,
              [&](int64_t row, int64_t group, int64_t lane, uint8_t* head) {
                const int64_t at = row * layout.groups + group;
                write_scale(head, lane, params.scales[at], params.shape.scale_dtype);
                write_scale(head + layout.scale_bytes, lane, params.zeros[at],
                            params.shape.scale_dtype);
                const uint8_t* values =
                    params.values + row * params.shape.inputs + group * params.shape.group;
                uint8_t* bytes = head + 2 * layout.scale_bytes + 4 * lane;
                for (int64_t block = 0; block < layout.blocks; ++block) {
                  for (int i = 0; i < 4; ++i)
                    bytes[i] = static_cast<uint8_t>(values[i] | values[4 + i] << 4);
                  values += core::kBlockInputs;
                  bytes += core::kBlockBytes;
                }
              });
  return {};
}

int64_t int4_packed_bytes(const Int4Shape& shape, Stream::Device device) {
  if (device == Stream::Device::kCpu) return int4_packed_bytes(shape);
  return check_on_cuda(shape).ok() ? tiles_bytes(core::Int4Tiles(shape)) : -1;
}

Result int4_pack(const Int4PackParams& params, Stream stream) {
  if (stream.device == Stream::Device::kCpu) return int4_pack(params);
  if (const Result result = check_on_cuda(params.shape); !result.ok()) return result;
  if (const Result result = check_both(params, 16); !result.ok()) return result;
  return cuda::int4_pack(params, stream.cuda);
}

Result int4_packed_check(const Int4Shape& shape, const void* packed, int64_t bytes) {
  if (const Result result = check_shape(shape); !result.ok()) return result;
  return check_packed(label_of(shape), packed, bytes, int4_packed_bytes(shape));
}

Result int4_unpack(const Int4UnpackParams& params) {
  if (const Result result = check_both(params); !result.ok()) return result;
  const Int4Layout layout(params.shape);
  const Result label = check_label(label_of(params.shape), params.packed);
  if (!label.ok()) return label;
  over_groups(
      params.shape, at_weights(params).packed,
      [&](int64_t row, int64_t group, int64_t lane, const uint8_t* head) {
        const int64_t at = row * layout.groups + group;
        params.scales[at] = read_scale(head, lane, params.shape.scale_dtype);
        params.zeros[at] = read_scale(head + layout.scale_bytes, lane, params.shape.scale_dtype);
        uint8_t* values = params.values + row * params.shape.inputs + group * params.shape.group;
        const uint8_t* bytes = head + 2 * layout.scale_bytes + 4 * lane;
        for (int64_t block = 0; block < layout.blocks; ++block) {
          for (int i = 0; i < 4; ++i) {
            values[i] = bytes[i] & 15;
            values[4 + i] = bytes[i] >> 4;
          }
          values += core::kBlockInputs;
          bytes += core::kBlockBytes;
        }
      });
  return {};
}

int64_t int4_workspace_bytes(const Int4Shape& shape, int64_t tokens) {
  if (!check_shape(shape).ok() || tokens < 0) return -1;
  if (tokens == 0) return 0;
  const int64_t groups = shape.inputs / shape.group;
  return core::scales_at(shape) +
         kInt4Tokens * groups * static_cast<int64_t>(sizeof(core::RoundedGroup));
}

namespace {

Result product_on_cuda(cuda::Int4Product product, Stream stream) {
  const Result result = check_on_cuda(product);
  if (!result.ok() || product.tokens == 0) return result;
  if (product.tokens == 1) product.x_stride = product.shape.inputs;  // the caller's may be any
  return cuda::int4_product(product, stream.cuda);
}

Result check_ending(const char* operation, DType dtype, Stream stream) {
  if (stream.device != Stream::Device::kCuda) {
    Result out = invalid("%s: expected a CUDA stream, given the CPU", operation);
    out.code = Result::Code::kUnsupported;
    return out;
  }
  if (dtype == DType::kBFloat16) return {};
  return expected("dtype", "bfloat16 (1)", static_cast<int>(dtype));
}

}  // namespace

Result int4_gated_product(const Int4ProductParams& params, Stream stream) {
  const Result ending = check_ending("int4_gated_product", params.dtype, stream);
  if (!ending.ok()) return ending;
  if (params.shape.outputs % (2 * core::kTileOutputs) != 0)
    return expected("outputs", "a multiple of 64", params.shape.outputs);
  return product_on_cuda({params, true}, stream);
}

Result int4_rotary_product(const Int4RotaryParams& params, Stream stream) {
  cuda::Int4Product product{params.product, false, true, params.append};
  RotaryParams& turn = product.append.turn;
  turn.x = product.y;
  for (const DType dtype : {product.dtype, turn.dtype}) {
    const Result ending = check_ending("int4_rotary_product", dtype, stream);
    if (!ending.ok()) return ending;
  }
  if (const Result result = check(product.append); !result.ok()) return result;
  const int64_t features = (turn.heads + 2 * turn.groups) * turn.width;
  if (product.shape.outputs != features)
    return expected("outputs", "the features of all heads", product.shape.outputs);
  if (product.tokens != turn.batch * turn.tokens)
    return expected("tokens", "the tokens of all rows", product.tokens);
  if (product.tokens > 1 && product.y_stride != features)
    return expected("y_stride", "the outputs, with heads", product.y_stride);
  if (product.residual != nullptr) return invalid("residual: expected none with heads");
  product.y_stride = features;
  return product_on_cuda(product, stream);
}

Result int4_product(const Int4ProductParams& params, Stream stream) {
  if (stream.device == Stream::Device::kCuda) return product_on_cuda({params}, stream);
  if (const Result isa = cpu::check_isa(); !isa.ok()) return isa;
  if (const Result result = check(params); !result.ok()) return result;
  if (params.norm != nullptr || params.residual != nullptr)
    return invalid("norm, residual: expected none on the CPU");
  if (params.tokens > 0) cpu::int4_product(at_weights(params), stream.executor);
  return {};
}

}  // namespace polyspec
