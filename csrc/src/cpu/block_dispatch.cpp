// Picks the last instruction set that this processor has, and spreads the output tiles of a product
// with GGUF blocks over the caller's threads.
#include "cpu/block_dispatch.hpp"

#include "cpu/block_layout.hpp"
#include "cpu/product_spread.hpp"

namespace polyspec::cpu {

const Blocks& blocks() {
  static const Blocks& table = chosen(kBlocksCopies);
  return table;
}

void block_product(const BlockProductParams& params, const Executor& executor) {
  const core::BlockLayout layout(params.shape);
  spread_product(blocks(), params, core::kBlockTokens, layout.tiles, core::kBlockOutputs, executor);
}

}  // namespace polyspec::cpu
