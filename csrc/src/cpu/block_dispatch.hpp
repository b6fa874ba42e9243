// The CPU backend of polyspec::block_pack, block_rows and block_product.
#pragma once

#include "cpu/block_tables.hpp"

namespace polyspec::cpu {

// The copy for the instruction set in use.
const Blocks& blocks();

// Arguments are checked already (api/blocks.cpp).
void block_pack(const BlockPackParams& params, const Executor& executor);
void block_rows(const BlockRowsParams& params, const Executor& executor);
void block_product(const BlockProductParams& params, const Executor& executor);

}  // namespace polyspec::cpu
