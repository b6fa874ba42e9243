// Where things lie in a packed matrix of GGUF blocks and in the workspace of a product
// (polyspec/blocks.hpp).
#pragma once

#include "core/macros.hpp"
#include "cpu/rounded_rows.hpp"
#include "polyspec/blocks.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kBlockOutputs = 16;  // of a tile
constexpr int64_t kBlockTokens = 16;   // of a pass over the weights
constexpr int64_t kHeadBytes = 64;     // d and minima of a block

// The format of a type's blocks. `bits` is 0 for an unknown type.
struct BlockForm {
  int32_t bits = 0;        // of a packed weight
  int32_t group = 32;      // inputs of one scale
  int32_t inputs = 32;     // of a block
  int32_t offset = 0;      // the packed weight of value 0
  int32_t file_bytes = 0;  // of a block in a file
  bool minima = false;     // other than 0
  bool scaled = false;     // groups have whole numbers as scales
};

inline BlockForm form_of(BlockType type) {
  switch (type) {
    case BlockType::kQ4_0:
      return {4, 32, 32, 8, 18, false, false};
    case BlockType::kQ4_1:
      return {4, 32, 32, 0, 20, true, false};
    case BlockType::kQ5_0:
      return {6, 32, 32, 16, 22, false, false};
    case BlockType::kQ5_1:
      return {6, 32, 32, 0, 24, true, false};
    case BlockType::kQ8_0:
      return {8, 32, 32, 128, 34, false, false};
    case BlockType::kQ4_K:
      return {4, 32, 256, 0, 144, true, true};
    case BlockType::kQ5_K:
      return {6, 32, 256, 0, 176, true, true};
    case BlockType::kQ6_K:
      return {6, 16, 256, 32, 210, false, true};
  }
  return {};
}

// Of 16 outputs.
constexpr int64_t group_bytes_of(int bits, int64_t inputs) { return inputs * 2 * bits; }

struct BlockLayout {
  BlockForm form;
  int64_t tiles, blocks, groups;  // of the matrix, of a tile, of a block
  int64_t scale_bytes;            // of a group's whole numbers
  int64_t head_bytes, group_bytes, block_bytes, tile_bytes;

  explicit BlockLayout(const BlockShape& shape)
      : form(form_of(shape.type)),
        tiles((shape.outputs + kBlockOutputs - 1) / kBlockOutputs),
        blocks(shape.inputs / form.inputs),
        groups(form.inputs / form.group),
        scale_bytes(!form.scaled ? 0 : kBlockOutputs * (form.minima ? 2 : 1)),
        head_bytes(kHeadBytes + groups * scale_bytes),
        group_bytes(group_bytes_of(form.bits, form.group)),
        block_bytes(head_bytes + groups * group_bytes),
        tile_bytes(blocks * block_bytes) {}
};

// The workspace of a pass of m <= 16 tokens: rounded activations [k / group, m, group] of 8 bits,
// then their RoundedGroup [k / group, m].
inline int64_t block_groups_at(const BlockShape& shape) { return kBlockTokens * shape.inputs; }

}  // namespace polyspec::POLYSPEC_CORE
