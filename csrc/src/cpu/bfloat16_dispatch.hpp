#pragma once

#include "cpu/bfloat16_tables.hpp"

namespace polyspec::cpu {

// The instruction set in use.
const BFloat16Product& bfloat16();

void bfloat16_product(const BFloat16ProductParams& params, const Executor& executor);

}  // namespace polyspec::cpu
