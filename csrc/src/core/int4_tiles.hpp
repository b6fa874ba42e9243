// Where things lie in a 4-bit matrix that is packed for CUDA (polyspec/int4.hpp).
#pragma once

#include "core/macros.hpp"
#include "polyspec/int4.hpp"
#include "polyspec/philox.hpp"  // POLYSPEC_HD

namespace polyspec::POLYSPEC_CORE {

constexpr int kTileOutputs = 32;  // two matrices of 16 rows, as the tensor cores take them
constexpr int kTileInputs = 32;   // of a chunk: two steps of 16
constexpr int kChunkVectors = 32;
constexpr int kScaleVectors = 8;
constexpr int kVectorBytes = 16;
constexpr int kWordLeft = 3;  // bits that a word is rotated: where bfloat16 needs first numbers

struct Int4Tiles {
  int64_t tiles, groups, group_vectors, tile_bytes;
  int shift;  // 2^shift chunks are a group

  POLYSPEC_HD explicit Int4Tiles(const Int4Shape& shape)
      // An even number, since some CTAs have two.
      : tiles((shape.outputs + 2 * kTileOutputs - 1) / (2 * kTileOutputs) * 2),
        groups(shape.inputs / shape.group),
        group_vectors(kScaleVectors + shape.group / kTileInputs * kChunkVectors),
        tile_bytes(groups * group_vectors * kVectorBytes),
        shift(shape.group == 32    ? 0
              : shape.group == 64  ? 1
              : shape.group == 128 ? 2
                                   : 3) {}

  // From the beginning of a tile.
  POLYSPEC_HD int64_t scales_at(int64_t group) const {
    return group * group_vectors * kVectorBytes;
  }
  POLYSPEC_HD int64_t chunk_at(int64_t chunk) const {
    return (chunk * kChunkVectors + ((chunk >> shift) + 1) * kScaleVectors) * kVectorBytes;
  }
};

}  // namespace polyspec::POLYSPEC_CORE
