// The CUDA backend of polyspec/dense.hpp, and how CTAs share a product: host arithmetic without
// CUDA, so that a CTest reaches it.
#pragma once

#include "polyspec/dense.hpp"

namespace polyspec::cuda {

// Arguments are checked already (api/dense.cpp). One launch, or kUnsupported and none.
Result dense_product(const DenseProductParams& params, CUstream_st* stream);

struct DensePlan {
  int shift = 0;   // 2^shift CTAs are a cluster, of which each has as many of the eight slices
  int stages = 0;  // of weights that each warp has under way; 0: nothing fits
  int bytes = 0;   // of shared memory; the rest is for kernels that begin early
};

constexpr int kDenseSlices = 8;   // of the inputs
constexpr int kDenseChunk = 32;   // inputs
constexpr int kStageChunks = 4;   // of a row in a stage
constexpr int kDenseRowPad = 64;  // lanes of two adjacent rows then read other banks
constexpr int kDenseRowBytes = kStageChunks * kDenseChunk * 2;
constexpr int kDenseRowPitch = kDenseRowBytes + kDenseRowPad;
constexpr int kDenseStageBytes = static_cast<int>(kDenseOutputs) * kDenseRowPitch;
constexpr int kDenseStages = 3, kDenseMostStages = 4;  // 96 and 128 KB of weights under way

// Shared memory before the activations: the sums of two tiles.
constexpr int64_t dense_fixed_bytes(int token_tiles) {
  return 2 * kDenseSlices * token_tiles * 512;
}

// `forced`: the CTAs of a cluster; 0: as few as leave kDenseStages, or as leave most.
inline DensePlan dense_plan(int64_t inputs, int token_tiles, int64_t shared_memory,
                            int forced = 0) {
  DensePlan best;
  for (int shift = 0; shift < 4 && best.stages < kDenseStages; ++shift) {
    const int ctas = 1 << shift;
    if (forced != 0 && ctas != forced) continue;
    const int64_t x = (inputs / kDenseChunk + ctas - 1) / ctas * 512 * token_tiles;
    const int64_t fixed = dense_fixed_bytes(token_tiles) + x;
    constexpr int64_t kStage = kDenseSlices * kDenseStageBytes;
    const int64_t fitting = (shared_memory - fixed) / kStage;
    const int64_t stages = fitting < kDenseMostStages ? fitting : kDenseMostStages;
    if (stages < 2 || stages <= best.stages) continue;
    best = {shift, static_cast<int>(stages), static_cast<int>(fixed + stages * kStage)};
  }
  return best;
}

}  // namespace polyspec::cuda
