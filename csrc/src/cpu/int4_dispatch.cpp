// Picks the last instruction set that this processor has, and spreads the output tiles of a 4-bit
// product over the caller's threads.
#include "cpu/int4_dispatch.hpp"

#include "cpu/int4_layout.hpp"
#include "cpu/product_spread.hpp"

namespace polyspec::cpu {

const Int4& int4() {
  static const Int4& table = chosen(kInt4Copies);
  return table;
}

void int4_product(const Int4ProductParams& params, const Executor& executor) {
  const int64_t tiles = core::Int4Layout(params.shape).tiles;
  spread_product(int4(), params, kInt4Tokens, tiles, kInt4Outputs, executor);
}

}  // namespace polyspec::cpu
