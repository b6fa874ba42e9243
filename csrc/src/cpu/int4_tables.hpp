// The 4-bit product's entry points, one set per instruction set (int4_product.cpp is compiled once
// for each).
#pragma once

#include "polyspec/int4.hpp"

namespace polyspec::cpu {

struct Int4 {
  // Rounds the activations of `tokens` rows from `first` on into the workspace.
  void (*prepare)(const Int4ProductParams& params, int64_t first, int64_t tokens);
  // Output tiles [begin, end) of those rows.
  void (*multiply)(const Int4ProductParams& params, int64_t first, int64_t tokens, int64_t begin,
                   int64_t end);
  const char* isa;
};

extern const Int4 kInt4Baseline;
#ifdef POLYSPEC_X86
extern const Int4 kInt4Avx2;
extern const Int4 kInt4Avx512Vnni;
#endif

}  // namespace polyspec::cpu
