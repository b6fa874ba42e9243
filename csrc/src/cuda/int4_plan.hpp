// How CTAs share a product with 4-bit weights that are streamed through shared memory
// (int4_stream.cuh). Host arithmetic without CUDA, so that a CTest reaches it.
#pragma once

#include "core/int4_tiles.hpp"

namespace polyspec::cuda {

struct Int4Plan {
  int shift = 0;   // 2^shift CTAs are a cluster, of which each has as many of the eight slices
  int stages = 0;  // of weights that each warp has under way; 0: nothing fits
  int groups = 0;  // of the activations in shared memory
};

constexpr int kStreamWarps = 8;
constexpr int kMostStages = 32;
constexpr int kPairShift = 2;  // groups of 128 inputs are copied two at a time
// Bytes of weights in flight on a multiprocessor that hide the latency of memory.
constexpr int64_t kBytesUnderWay = 128 * 1024;

// Tiles with adjacent sums.
constexpr int stream_sums(int token_tiles) { return token_tiles < 4 ? 2 : 1; }
// Shared memory before the activations: sums, and barriers.
constexpr int64_t stream_fixed_bytes(int token_tiles) {
  return stream_sums(token_tiles) * kStreamWarps * 2 * token_tiles * 512 +
         kStreamWarps * kMostStages * 8;
}

// `forced`: the CTAs of a cluster; 0: as few as leave kBytesUnderWay, or as leave most.
inline Int4Plan int4_plan(const Int4Shape& shape, int token_tiles, int64_t shared_memory,
                          int forced = 0) {
  const core::Int4Tiles of(shape);
  const int64_t stage =
      kStreamWarps * (of.shift == kPairShift ? 2 : 1) * of.group_vectors * core::kVectorBytes;
  Int4Plan best;
  for (int shift = 0; shift < 4; ++shift) {
    const int ctas = 1 << shift;
    if (forced != 0 && ctas != forced) continue;
    const int64_t groups = (of.groups + ctas - 1) / ctas;
    const int64_t x = groups * ((512 << of.shift) + 32) * token_tiles;
    const int64_t left = shared_memory - stream_fixed_bytes(token_tiles) - x;
    const int stages = static_cast<int>(left / stage < kMostStages ? left / stage : kMostStages);
    if (stages < 2 || stages <= best.stages) continue;
    best = {shift, stages, static_cast<int>(groups)};
    if (stages == kMostStages || stages * stage >= kBytesUnderWay) break;
  }
  return best;
}

}  // namespace polyspec::cuda
