// The CUDA backend behind polyspec::sample and polyspec::verify. Without POLYSPEC_CUDA stub.cpp
// answers kUnsupported.
#pragma once

#include "polyspec/verify.hpp"

namespace polyspec::cuda {

// Arguments are checked already (operators.cpp). Both launch on the stream and return.
Result sample(const SampleParams& params, CUstream_st* stream);
Result verify(const VerifyParams& params, CUstream_st* stream);

// Whether a device that these kernels run on is there. Never fails.
bool available();

}  // namespace polyspec::cuda
