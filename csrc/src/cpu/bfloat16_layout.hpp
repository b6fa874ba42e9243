// Where things lie in a packed bfloat16 matrix and in the workspace of a product
// (polyspec/bfloat16.hpp).
#pragma once

#include "core/macros.hpp"
#include "polyspec/bfloat16.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kPairBytes = 64;  // of a block: two inputs of 16 outputs

struct BFloat16Layout {
  int64_t tiles, pairs;  // of the matrix, of the inputs
  int64_t tile_bytes;

  explicit BFloat16Layout(const BFloat16Shape& shape)
      : tiles((shape.outputs + kBFloat16Outputs - 1) / kBFloat16Outputs),
        pairs((shape.inputs + 1) / 2),
        tile_bytes(pairs * kPairBytes) {}
};

// Tokens of a pass over the weights. Long prompts go in several, for which the activations of one
// stay in a cache.
constexpr int64_t kBFloat16Tokens = 128;

// The workspace of a pass of m tokens: for each part of them (tiles.hpp) its activations
// [k / 2, tokens of the part], in pairs.
inline int64_t bfloat16_workspace(const BFloat16Layout& layout, int64_t tokens) {
  return layout.pairs * 4 * (tokens < kBFloat16Tokens ? tokens : kBFloat16Tokens);
}

}  // namespace polyspec::POLYSPEC_CORE
