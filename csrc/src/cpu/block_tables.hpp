// The block product's entry points, one set per instruction set (block_product.cpp is compiled once
// for each).
#pragma once

#include "cpu/isa.hpp"
#include "cpu/product_table.hpp"
#include "polyspec/blocks.hpp"

namespace polyspec::cpu {

using Blocks = ProductTable<BlockProductParams>;

extern const Blocks kBlocksBaseline, kBlocksDotprod, kBlocksAvx2, kBlocksAvxVnni, kBlocksAvx512Vnni;
constexpr Copy<Blocks> kBlocksCopies[] = {
    {Isa::kBaseline, &kBlocksBaseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kBlocksAvx2},
    {Isa::kAvxVnni, &kBlocksAvxVnni},
    {Isa::kAvx512Vnni, &kBlocksAvx512Vnni},
#elif defined(POLYSPEC_AARCH64)
    {Isa::kDotprod, &kBlocksDotprod},
#endif
};

}  // namespace polyspec::cpu
