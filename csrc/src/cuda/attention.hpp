// The CUDA backend of polyspec/attention.hpp.
#pragma once

#include "polyspec/attention.hpp"

namespace polyspec::cuda {

// Arguments are checked already (api/attention.cpp).
Result attention(const AttentionParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
