// The CUDA backend of polyspec/int4.hpp.
#pragma once

#include "polyspec/int4.hpp"

namespace polyspec::cuda {

// Arguments are checked already (api/int4.cpp). Each is one launch on the stream.
Result int4_pack(const Int4PackParams& params, CUstream_st* stream);
Result int4_product(const Int4ProductParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
