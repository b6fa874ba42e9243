// The CUDA backend of polyspec/int4.hpp.
#pragma once

#include "polyspec/int4.hpp"

namespace polyspec::cuda {

struct Int4Product : Int4ProductParams {
  bool gated = false;  // as int4_gated_product
};

// Arguments are checked already (api/int4.cpp).
Result int4_pack(const Int4PackParams& params, CUstream_st* stream);
Result int4_product(const Int4Product& params, CUstream_st* stream);

}  // namespace polyspec::cuda
