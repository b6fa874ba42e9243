// The block product's entry points, one set per instruction set (block_product.cpp is compiled once
// for each).
#pragma once

#include "polyspec/blocks.hpp"

namespace polyspec::cpu {

struct Blocks {
  // Rounds the activations of `tokens` rows from `first` on into the workspace.
  void (*prepare)(const BlockProductParams& params, int64_t first, int64_t tokens);
  // Output tiles [begin, end) of those rows.
  void (*multiply)(const BlockProductParams& params, int64_t first, int64_t tokens, int64_t begin,
                   int64_t end);
  const char* isa;
};

extern const Blocks kBlocksBaseline;
#ifdef POLYSPEC_X86
extern const Blocks kBlocksAvx2;
extern const Blocks kBlocksAvx512Vnni;
#endif

}  // namespace polyspec::cpu
