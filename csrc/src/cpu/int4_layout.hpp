// Where things lie in a packed 4-bit matrix and in the workspace of a product (polyspec/int4.hpp).
#pragma once

#include "core/macros.hpp"
#include "cpu/rounded_rows.hpp"
#include "polyspec/int4.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kBlockInputs = 8;  // of one block of 64 bytes
constexpr int64_t kBlockBytes = 64;
constexpr int64_t kChunkInputs = 32;  // the smallest group
constexpr int64_t kChunkBlocks = kChunkInputs / kBlockInputs;
constexpr int32_t kInt4Offset = 8;  // the packed weight of value 0

struct Int4Layout {
  int64_t tiles, groups, blocks;  // of the matrix, of a tile, of a group
  int64_t scale_bytes;            // of the 16 scales of a group, and of its zeros
  int64_t group_bytes, tile_bytes;

  explicit Int4Layout(const Int4Shape& shape)
      : tiles((shape.outputs + kInt4Outputs - 1) / kInt4Outputs),
        groups(shape.inputs / shape.group),
        blocks(shape.group / kBlockInputs),
        scale_bytes(kInt4Outputs * (shape.scale_dtype == DType::kFloat32 ? 4 : 2)),
        group_bytes(2 * scale_bytes + blocks * kBlockBytes),
        tile_bytes(groups * group_bytes) {}
};

// The workspace of a pass of m tokens: rounded activations of 8 bits, in chunks as a copy reads
// them, [k / chunk, m, chunk]; then their RoundedGroup [k / group, m].
inline int64_t scales_at(const Int4Shape& shape) { return kInt4Tokens * shape.inputs; }
inline int8_t* values_of(const Int4ProductParams& params) {
  return static_cast<int8_t*>(params.workspace);
}
inline RoundedGroup* scales_of(const Int4ProductParams& params) {
  return reinterpret_cast<RoundedGroup*>(static_cast<char*>(params.workspace) +
                                         scales_at(params.shape));
}

}  // namespace polyspec::POLYSPEC_CORE
