#pragma once

#include "cpu/dense_tables.hpp"

namespace polyspec::cpu {

// The instruction set in use.
const Dense& dense();

void dense_product(const DenseProductParams& params, const Executor& executor);

}  // namespace polyspec::cpu
