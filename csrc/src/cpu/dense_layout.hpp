// Where things lie in a packed matrix and in the workspace of a product (polyspec/dense.hpp).
#pragma once

#include "core/macros.hpp"
#include "polyspec/dense.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kBlockBytes = 64;  // 4 bytes of inputs for each output of a tile

struct DenseLayout {
  int64_t element_bytes, block_inputs;
  int64_t tiles, blocks;  // of the matrix, of a tile
  int64_t tile_bytes;

  explicit DenseLayout(const DenseShape& shape)
      : element_bytes(shape.dtype == DType::kFloat32 ? 4 : 2),
        block_inputs(4 / element_bytes),
        tiles((shape.outputs + kDenseOutputs - 1) / kDenseOutputs),
        blocks((shape.inputs + block_inputs - 1) / block_inputs),
        tile_bytes(blocks * kBlockBytes) {}
};

// Tokens of a pass over the weights. Long prompts go in several, for which the activations of one
// stay in a cache.
constexpr int64_t kDenseTokens = 384;

// The workspace of a pass of m tokens: for each part of them (tiles.hpp) its activations [blocks,
// steps, tokens of the part], 4 bytes each; at most one step for each input (dense_lanes.hpp). Or
// the activations of all tokens, [blocks / 16, m], 64 bytes each (dense_amx.cpp).
inline int64_t dense_workspace(const DenseLayout& layout, int64_t tokens) {
  const int64_t vectors = layout.blocks * layout.block_inputs * 4;
  const int64_t matrices = (layout.blocks + 15) / 16 * 64;
  return (vectors > matrices ? vectors : matrices) *
         (tokens < kDenseTokens ? tokens : kDenseTokens);
}

}  // namespace polyspec::POLYSPEC_CORE
