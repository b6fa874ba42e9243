// Sums of squares of a warp: thread l has lanes l and l + 32 of core::kNormLanes.
#pragma once

#include "core/layer_math.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {

// Lane l of core::kSumLanes in thread l.
__device__ __forceinline__ float folded(const float (&lanes)[2]) {
  static_assert(core::kNormLanes == 4 * core::kSumLanes);
  const float sum = lanes[0] + lanes[1];
  const uint32_t bits =
      __shfl_sync(0xffffffffu, core::bit_cast<uint32_t>(sum), threadIdx.x % 32 ^ core::kSumLanes);
  return sum + core::bit_cast<float>(bits);
}

}  // namespace polyspec::cuda
