// The entry points of a product with packed whole numbers, for one instruction set.
#pragma once

#include <cstdint>

namespace polyspec::cpu {

template <class Params>
struct ProductTable {
  // Rounds the activations of rows [begin, end) of the `tokens` from `first` on into the workspace.
  void (*prepare)(const Params& params, int64_t first, int64_t tokens, int64_t begin, int64_t end);
  // Output tiles [begin, end) of these rows.
  void (*multiply)(const Params& params, int64_t first, int64_t tokens, int64_t begin, int64_t end);
  const char* isa;
};

}  // namespace polyspec::cpu
