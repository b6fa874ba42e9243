// The CPU backend of polyspec::sample and polyspec::verify.
#pragma once

#include "polyspec/verify_tree.hpp"

namespace polyspec::cpu {

// Arguments are checked already (operators.cpp).
void sample(const SampleParams& params, const Executor& executor);
void verify(const VerifyParams& params, const Executor& executor);
void verify_tree(const VerifyTreeParams& params, const Executor& executor);

// Name of the instruction set in use: "baseline", "avx2" or "avx512".
const char* isa();

}  // namespace polyspec::cpu
