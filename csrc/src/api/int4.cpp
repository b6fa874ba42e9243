// polyspec::int4_*: check what the host can see, pack and unpack, and hand products over to the
// backend.
#include "polyspec/int4.hpp"

#include <cstring>

#include "api/checks.hpp"
#include "core/row.hpp"
#include "cpu/int4_dispatch.hpp"
#include "cpu/int4_layout.hpp"

namespace polyspec {
namespace {

using core::BFloat16;
using core::Int4Layout;

Result check(const Int4Shape& shape) {
  if (shape.group != 32 && shape.group != 64 && shape.group != 128 && shape.group != 256)
    return invalid("group must be 32, 64, 128 or 256");
  if (const Result result = check_matrix(shape.outputs, shape.inputs); !result.ok()) return result;
  if (shape.inputs % shape.group != 0) return invalid("inputs must be a multiple of group");
  if (shape.scale_dtype != DType::kFloat32 && shape.scale_dtype != DType::kBFloat16)
    return invalid("scale_dtype must be kFloat32 or kBFloat16");
  return {};
}

Result check(const Int4PackParams& p) {
  if (const Result result = check(p.shape); !result.ok()) return result;
  if (p.values == nullptr || p.scales == nullptr || p.zeros == nullptr || p.packed == nullptr)
    return invalid("values, scales, zeros and packed must not be null");
  if (!aligned(p.packed)) return invalid("packed must be 64-byte aligned");
  return {};
}

Result check(const Int4ProductParams& p) {
  if (const Result result = check(p.shape); !result.ok()) return result;
  if (p.tokens < 0) return invalid("tokens must be >= 0");
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return invalid("dtype is not a DType");
  if (p.tokens == 0) return {};
  if (p.x == nullptr || p.packed == nullptr || p.y == nullptr || p.workspace == nullptr)
    return invalid("x, packed, y and workspace must not be null");
  if (!aligned(p.packed) || !aligned(p.workspace))
    return invalid("packed and workspace must be 64-byte aligned");
  return {};
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
template <class Body>
void over_groups(const Int4PackParams& p, const Body& body) {
  const Int4Layout layout(p.shape);
  for (int64_t row = 0; row < p.shape.outputs; ++row) {
    uint8_t* tile = p.packed + row / kInt4Outputs * layout.tile_bytes;
    for (int64_t group = 0; group < layout.groups; ++group)
      body(row, group, row % kInt4Outputs, tile + group * layout.group_bytes);
  }
}

}  // namespace

int64_t int4_packed_bytes(const Int4Shape& shape) {
  if (!check(shape).ok()) return -1;
  const Int4Layout layout(shape);
  return layout.tiles * layout.tile_bytes;
}

Result int4_pack(const Int4PackParams& params) {
  if (const Result result = check(params); !result.ok()) return result;
  const int64_t count = params.shape.outputs * params.shape.inputs;
  uint8_t all = 0;
  for (int64_t i = 0; i < count; ++i) all |= params.values[i];
  if (all > 15) return invalid("values must be in [0, 16)");
  const Int4Layout layout(params.shape);
  std::memset(params.packed, 0, static_cast<size_t>(int4_packed_bytes(params.shape)));
  over_groups(params, [&](int64_t row, int64_t group, int64_t lane, uint8_t* head) {
    const int64_t at = row * layout.groups + group;
    write_scale(head, lane, params.scales[at], params.shape.scale_dtype);
    write_scale(head + layout.scale_bytes, lane, params.zeros[at], params.shape.scale_dtype);
    const uint8_t* values = params.values + row * params.shape.inputs + group * params.shape.group;
    uint8_t* bytes = head + 2 * layout.scale_bytes + 4 * lane;
    for (int64_t block = 0; block < layout.blocks; ++block) {
      for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(values[i] | values[4 + i] << 4);
      values += core::kBlockInputs;
      bytes += core::kBlockBytes;
    }
  });
  return {};
}

Result int4_unpack(const Int4PackParams& params) {
  if (const Result result = check(params); !result.ok()) return result;
  const Int4Layout layout(params.shape);
  over_groups(params, [&](int64_t row, int64_t group, int64_t lane, const uint8_t* head) {
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
  if (!check(shape).ok() || tokens < 0) return -1;
  if (tokens == 0) return 0;
  const int64_t groups = shape.inputs / shape.group;
  return core::scales_at(shape) +
         kInt4Tokens * groups * static_cast<int64_t>(sizeof(core::Int4Scale));
}

Result int4_product(const Int4ProductParams& params, Stream stream) {
  if (const Result result = check(params); !result.ok()) return result;
  if (stream.device != Stream::Device::kCpu)
    return {Result::Code::kUnsupported, "int4_product runs on the CPU only"};
  if (params.tokens > 0) cpu::int4_product(params, stream.executor);
  return {};
}

const char* int4_isa() { return cpu::int4().isa; }

}  // namespace polyspec
