// The CPU backend of polyspec::int4_product.
#pragma once

#include "cpu/int4_tables.hpp"

namespace polyspec::cpu {

// The copy for the instruction set in use.
const Int4& int4();

// Arguments are checked already (api/int4.cpp).
void int4_product(const Int4ProductParams& params, const Executor& executor);

}  // namespace polyspec::cpu
