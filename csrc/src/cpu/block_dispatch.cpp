// Picks the widest instruction set this processor has, and spreads the output tiles of a product
// with GGUF blocks over the caller's threads.
#include "cpu/block_dispatch.hpp"

#include "cpu/block_layout.hpp"
#include "cpu/isa.hpp"
#include "cpu/product_spread.hpp"

namespace polyspec::cpu {
namespace {

const Blocks& choose() {
#ifdef POLYSPEC_X86
  if (isa_in_use() >= Isa::kAvx512Vnni) return kBlocksAvx512Vnni;
  if (isa_in_use() >= Isa::kAvx2) return kBlocksAvx2;
#endif
  return kBlocksBaseline;
}

}  // namespace

const Blocks& blocks() {
  static const Blocks& chosen = choose();
  return chosen;
}

void block_product(const BlockProductParams& params, const Executor& executor) {
  const core::BlockLayout layout(params.shape);
  spread_product(blocks(), params, core::kBlockTokens, layout.tiles, core::kBlockOutputs, executor);
}

}  // namespace polyspec::cpu
