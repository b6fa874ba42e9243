// Where things lie in a packed 4-bit matrix and in the workspace of a product (polyspec/int4.hpp).
#pragma once

#include "core/macros.hpp"
#include "polyspec/int4.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kBlockInputs = 8;  // of one block of 64 bytes
constexpr int64_t kBlockBytes = 64;

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

// Input of a block whose q is the nibble at bit 4 * nibble.
constexpr int64_t input_of(int64_t nibble) {
  return nibble < 4 ? 2 * nibble : 2 * (nibble - 4) + 1;
}

// The workspace of a pass of m <= 16 tokens: activations [k / group, m, group], at most 4 bytes
// each, then their sums by group [m, k / group] in float32. (Rows of all k inputs would lie a power
// of two apart, and fall into the same few sets of the first cache.)
inline int64_t sums_at(const Int4Shape& shape) { return kInt4Tokens * shape.inputs * 4; }

}  // namespace polyspec::POLYSPEC_CORE
