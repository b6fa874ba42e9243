// Rounding a matrix to 4-bit numbers on the CPU.
#pragma once

#include "polyspec/int4.hpp"

namespace polyspec::cpu {

// Arguments are checked already (api/int4.cpp). Whether all groups have a scale and zero that are
// finite; otherwise the output is undefined.
bool int4_round(const Int4RoundParams& params, const Executor& executor);

}  // namespace polyspec::cpu
