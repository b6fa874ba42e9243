// Picks the widest instruction set this processor has, and spreads the output tiles of a bfloat16
// product over the caller's threads.
#include "cpu/bfloat16_dispatch.hpp"

#include <algorithm>

#include "cpu/bfloat16_layout.hpp"
#include "cpu/isa.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

// Of a task, which should outlast its hand-over to another thread: some 3 us from memory.
constexpr int64_t kWeightsPerTask = int64_t{1} << 15;
constexpr int64_t kPartsPerTask = 4;

const BFloat16Product& choose() {
#ifdef POLYSPEC_X86
  if (isa_in_use() >= Isa::kAvx512Bf16) return kBFloat16Avx512Bf16;
  if (isa_in_use() >= Isa::kAvx2) return kBFloat16Avx2;
#endif
  return kBFloat16Baseline;
}

}  // namespace

const BFloat16Product& bfloat16() {
  static const BFloat16Product& chosen = choose();
  return chosen;
}

void bfloat16_product(const BFloat16ProductParams& params, const Executor& executor) {
  const int64_t tiles = core::BFloat16Layout(params.shape).tiles;
  for (int64_t first = 0; first < params.tokens; first += core::kBFloat16Tokens) {
    const int64_t tokens = std::min(core::kBFloat16Tokens, params.tokens - first);
    spread(executor, bfloat16().parts(tokens), kPartsPerTask, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) bfloat16().prepare(params, first, tokens, begin);
    });
    const int64_t at_once = bfloat16().tiles_at_once(tokens);
    const int64_t weights = at_once * kBFloat16Outputs * params.shape.inputs;
    const int64_t each = at_once * std::max<int64_t>(1, kWeightsPerTask / weights);
    spread(executor, tiles, each, [&](int64_t begin, int64_t end) {
      bfloat16().multiply(params, first, tokens, begin, end);
    });
  }
}

}  // namespace polyspec::cpu
