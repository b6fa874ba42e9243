// The CUDA backend of polyspec/int4.hpp.
#pragma once

#include "core/int4_tiles.hpp"
#include "polyspec/int4.hpp"

namespace polyspec::cuda {

struct Int4Product : Int4ProductParams {
  bool gated = false;  // as int4_gated_product
  bool turns = false;  // as int4_rotary_product
  RotaryAppendParams append = {};

  // Tiles of outputs that are half a head.
  POLYSPEC_HD int64_t half_tiles() const { return append.turn.width / (2 * core::kTileOutputs); }
};

// Arguments are checked already (api/int4.cpp).
Result int4_pack(const Int4PackParams& params, CUstream_st* stream);
Result int4_product(const Int4Product& params, CUstream_st* stream);

}  // namespace polyspec::cuda
