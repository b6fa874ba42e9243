// How a product with packed whole numbers is spread over the caller's threads.
#pragma once

#include <algorithm>

#include "cpu/product_table.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {

// A task is a multiple of the most tiles that are multiplied at once, and should outlast its
// hand-over to another thread: so many weights take some 3 us from memory.
inline int64_t tiles_per_task(int64_t outputs_of_tile, int64_t inputs) {
  constexpr int64_t kTilesAtOnce = 4;
  constexpr int64_t kWeightsPerTask = int64_t{1} << 17;
  const int64_t weights = kTilesAtOnce * outputs_of_tile * inputs;
  return kTilesAtOnce * std::max<int64_t>(1, kWeightsPerTask / weights);
}

// Of activations that are rounded; so many take some 5 us.
inline int64_t tokens_per_task(int64_t inputs) {
  constexpr int64_t kActivationsPerTask = int64_t{1} << 14;
  return std::max<int64_t>(1, kActivationsPerTask / inputs);
}

// Rows in passes of at most `most` tokens over the weights, each pass's tiles by the entry points
// of `table`.
template <class Params>
void spread_product(const ProductTable<Params>& table, const Params& params, int64_t most,
                    int64_t tiles, int64_t outputs_of_tile, const Executor& executor) {
  const int64_t each = tiles_per_task(outputs_of_tile, params.shape.inputs);
  in_passes(params.tokens, most, [&](int64_t first, int64_t tokens) {
    spread(executor, tokens, tokens_per_task(params.shape.inputs),
           [&](int64_t begin, int64_t end) { table.prepare(params, first, tokens, begin, end); });
    spread(executor, tiles, each,
           [&](int64_t begin, int64_t end) { table.multiply(params, first, tokens, begin, end); });
  });
}

}  // namespace polyspec::cpu
