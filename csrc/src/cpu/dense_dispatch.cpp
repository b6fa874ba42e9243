// Picks the last instruction set that this processor has, and spreads the output tiles of a dense
// product over the caller's threads.
#include "cpu/dense_dispatch.hpp"

#include <algorithm>

#include "cpu/dense_layout.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

// Of a task, which should outlast its hand-over to another thread: some 3 us from memory.
constexpr int64_t kWeightsPerTask = int64_t{1} << 15;
constexpr int64_t kPartsPerTask = 4;

}  // namespace

const Dense& dense() {
  static const Dense& table = chosen(kDenseCopies);
  return table;
}

void dense_product(const DenseProductParams& params, const Executor& executor) {
  const int64_t tiles = core::DenseLayout(params.shape).tiles;
  in_passes(params.tokens, core::kDenseTokens, [&](int64_t first, int64_t tokens) {
    spread(executor, dense().parts(params.shape.dtype, tokens), kPartsPerTask,
           [&](int64_t begin, int64_t end) {
             for (; begin < end; ++begin) dense().prepare(params, first, tokens, begin);
           });
    const int64_t at_once = dense().tiles_at_once(params.shape.dtype, tokens);
    const int64_t weights = at_once * kDenseOutputs * params.shape.inputs;
    const int64_t each = at_once * std::max<int64_t>(1, kWeightsPerTask / weights);
    spread(executor, tiles, each, [&](int64_t begin, int64_t end) {
      dense().multiply(params, first, tokens, begin, end);
    });
  });
}

}  // namespace polyspec::cpu
