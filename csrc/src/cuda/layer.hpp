// The CUDA backend of polyspec/layer.hpp.
#pragma once

#include "polyspec/layer.hpp"

namespace polyspec::cuda {

// Arguments are checked already (api/layer.cpp). Each is one launch on the stream.
Result rms_norm(const RmsNormParams& params, CUstream_st* stream);
Result rotary(const RotaryParams& params, CUstream_st* stream);
Result rotary_append(const RotaryAppendParams& params, CUstream_st* stream);
Result gated(const GatedParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
