// The 4-bit product's entry points, one set per instruction set (int4_product.cpp is compiled once
// for each; int4_amx.cpp is one more).
#pragma once

#include "cpu/isa.hpp"
#include "cpu/product_table.hpp"
#include "polyspec/int4.hpp"

namespace polyspec::cpu {

using Int4 = ProductTable<Int4ProductParams>;

extern const Int4 kInt4Baseline, kInt4Dotprod, kInt4Avx2, kInt4AvxVnni, kInt4Avx512Vnni, kInt4Amx;
constexpr Copy<Int4> kInt4Copies[] = {
    {Isa::kBaseline, &kInt4Baseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kInt4Avx2},
    {Isa::kAvxVnni, &kInt4AvxVnni},
    {Isa::kAvx512Vnni, &kInt4Avx512Vnni},
    {Isa::kAmx, &kInt4Amx},
#elif defined(POLYSPEC_AARCH64)
    {Isa::kDotprod, &kInt4Dotprod},
#endif
};

}  // namespace polyspec::cpu
