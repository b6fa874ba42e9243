// Picks the widest instruction set this processor has, and spreads the output tiles of a 4-bit
// product over the caller's threads.
#include "cpu/int4_dispatch.hpp"

#include "cpu/int4_layout.hpp"
#include "cpu/isa.hpp"
#include "cpu/product_spread.hpp"

namespace polyspec::cpu {
namespace {

const Int4& choose() {
#ifdef POLYSPEC_X86
  if (isa_in_use() >= Isa::kAmx) return kInt4Amx;
  if (isa_in_use() >= Isa::kAvx512Vnni) return kInt4Avx512Vnni;
  if (isa_in_use() >= Isa::kAvx2) return kInt4Avx2;
#endif
  return kInt4Baseline;
}

}  // namespace

const Int4& int4() {
  static const Int4& chosen = choose();
  return chosen;
}

void int4_product(const Int4ProductParams& params, const Executor& executor) {
  const int64_t tiles = core::Int4Layout(params.shape).tiles;
  spread_product(int4(), params, kInt4Tokens, tiles, kInt4Outputs, executor);
}

}  // namespace polyspec::cpu
