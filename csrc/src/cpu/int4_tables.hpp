// The 4-bit product's entry points, one set per instruction set (int4_product.cpp is compiled once
// for each; int4_amx.cpp is one more).
#pragma once

#include "cpu/product_table.hpp"
#include "polyspec/int4.hpp"

namespace polyspec::cpu {

using Int4 = ProductTable<Int4ProductParams>;

extern const Int4 kInt4Baseline;
#ifdef POLYSPEC_X86
extern const Int4 kInt4Avx2;
extern const Int4 kInt4Avx512Vnni;
extern const Int4 kInt4Amx;
#endif

}  // namespace polyspec::cpu
