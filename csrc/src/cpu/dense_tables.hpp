// The dense product's entry points, one set per instruction set (dense_product.cpp is
// compiled once for each; dense_amx.cpp is one more).
#pragma once

#include "cpu/isa.hpp"
#include "polyspec/dense.hpp"

namespace polyspec::cpu {

struct Dense {
  // Into how many parts so many tokens are divided.
  int64_t (*parts)(DType dtype, int64_t tokens);
  // Lays the activations of one part of `tokens` rows from `first` on out in the workspace.
  void (*prepare)(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t part);
  // Output tiles [begin, end) of all of them.
  void (*multiply)(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
                   int64_t end);
  // How many tiles go side by side with so many tokens.
  int64_t (*tiles_at_once)(DType dtype, int64_t tokens);
  const char* isa;
};

extern const Dense kDenseBaseline, kDenseAvx2, kDenseAvx512, kDenseAvx512Bf16, kDenseAmx;
constexpr Copy<Dense> kDenseCopies[] = {
    {Isa::kBaseline, &kDenseBaseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kDenseAvx2},
    {Isa::kAvx512, &kDenseAvx512},
    {Isa::kAvx512Bf16, &kDenseAvx512Bf16},
    {Isa::kAmx, &kDenseAmx},
#endif
};

}  // namespace polyspec::cpu
