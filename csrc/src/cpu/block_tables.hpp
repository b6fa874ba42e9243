// The block product's entry points, one set per instruction set (block_product.cpp is compiled once
// for each).
#pragma once

#include "cpu/product_table.hpp"
#include "polyspec/blocks.hpp"

namespace polyspec::cpu {

using Blocks = ProductTable<BlockProductParams>;

extern const Blocks kBlocksBaseline;
#ifdef POLYSPEC_X86
extern const Blocks kBlocksAvx2;
extern const Blocks kBlocksAvx512Vnni;
#endif

}  // namespace polyspec::cpu
