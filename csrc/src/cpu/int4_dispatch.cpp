// Picks the widest instruction set this processor has, and spreads the output tiles of a 4-bit
// product over the caller's threads.
#include "cpu/int4_dispatch.hpp"

#include <algorithm>

#include "cpu/int4_layout.hpp"
#include "cpu/isa.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

// A task is a multiple of the most tiles that are multiplied at once, and should outlast its
// hand-over to another thread: so many weights take some 3 us from memory.
constexpr int64_t kTilesAtOnce = 4;
constexpr int64_t kWeightsPerTask = int64_t{1} << 17;

int64_t tiles_per_task(const Int4Shape& shape) {
  const int64_t weights = kTilesAtOnce * kInt4Outputs * shape.inputs;
  return kTilesAtOnce * std::max<int64_t>(1, kWeightsPerTask / weights);
}

const Int4& choose() {
#ifdef POLYSPEC_X86
  switch (isa_in_use()) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512Vnni:
      return kInt4Avx512Vnni;
    case Isa::kAvx512:
    case Isa::kAvx2:
      return kInt4Avx2;
    default:
      break;
  }
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
  const int64_t passes = (params.tokens + kInt4Tokens - 1) / kInt4Tokens;
  for (int64_t pass = 0; pass < passes; ++pass) {
    // Of one size, as nearly as may be.
    const int64_t first = params.tokens * pass / passes;
    const int64_t tokens = params.tokens * (pass + 1) / passes - first;
    int4().prepare(params, first, tokens);
    spread(executor, tiles, tiles_per_task(params.shape),
           [&](int64_t begin, int64_t end) { int4().multiply(params, first, tokens, begin, end); });
  }
}

}  // namespace polyspec::cpu
