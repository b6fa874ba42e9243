// The thread group of the CUDA backend: one CTA, whose teams are warps.
//
// All that is CUDA about the row algorithms is in this file: shuffles, barriers and shared memory.
// Reductions go warp first, then over one slot per warp. The slots are double-buffered, which saves
// the barrier after reading: a slot is written again two reductions later, and the barrier of the
// one in between has passed every reader.
#pragma once

#include "core/group.hpp"
#include "cuda/launch_shape.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

constexpr int kWarp = 32;
constexpr int kMaxCandidates = polyspec::cuda::kMaxCandidates;

// Tokens of a row that its filters may keep, in any order.
struct Candidates {
  alignas(16) float logits[kMaxCandidates];
  uint32_t tokens[kMaxCandidates];
  unsigned count;  // those that did not fit included
};

template <int kThreads>
struct CtaShared {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp,
                "whole warps, no more than one warp can reduce");
  Scratch scratch;
  Candidates candidates;
  uint64_t slots[2][kWarps];
};

// What reductions do with two values.
struct Smaller {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const {
    return static_cast<int64_t>(a) < static_cast<int64_t>(b) ? a : b;
  }
};
struct Plus {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
// Two values in one word, so that one reduction finds the larger of both.
struct BothLarger {
  __device__ __forceinline__ static uint64_t pack(int32_t first, int32_t second) {
    return static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 |
           static_cast<uint32_t>(second);
  }
  __device__ __forceinline__ static void unpack(uint64_t both, int32_t* first, int32_t* second) {
    *first = static_cast<int32_t>(both >> 32);
    *second = static_cast<int32_t>(both & 0xffffffffu);
  }
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const {
    int32_t first, second, other_first, other_second;
    unpack(a, &first, &second);
    unpack(b, &other_first, &other_second);
    return pack(first > other_first ? first : other_first,
                second > other_second ? second : other_second);
  }
};

// Shared memory adds 32 bits in one instruction but 64 bits in a loop that fails under contention,
// so the halves are added apart. Every wrap of the low half is somebody's carry, in any order.
__device__ __forceinline__ void add_to_bin(uint64_t* bin, uint64_t value) {
  unsigned* halves = reinterpret_cast<unsigned*>(bin);
  const unsigned low = static_cast<unsigned>(value);
  const unsigned before = atomicAdd(&halves[0], low);
  const unsigned carry = before + low < low ? 1 : 0;
  const unsigned high = static_cast<unsigned>(value >> 32) + carry;
  if (high != 0) atomicAdd(&halves[1], high);
}

// ---- Functions that are not inlined: kernels reduce in many places ----

constexpr unsigned kAllLanes = 0xffffffffu;

template <class Op>
__device__ __forceinline__ uint64_t warp_reduce(uint64_t value, Op op) {
  POLYSPEC_UNROLL
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = op(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
POLYSPEC_CALLED inline uint64_t warp_sum(uint64_t value) { return warp_reduce(value, Plus{}); }

// The sum over lower ranks, and over all.
struct Scan {
  uint64_t lower, total;
};
__device__ __forceinline__ Scan warp_scan_inline(uint64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint64_t inclusive = value;
  POLYSPEC_UNROLL
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  return {inclusive - value, __shfl_sync(kAllLanes, inclusive, kWarp - 1)};
}
POLYSPEC_CALLED inline Scan warp_scan(uint64_t value) { return warp_scan_inline(value); }

// In every thread the reduction over the CTA. slots: [kWarps]
template <int kWarps, class Op>
POLYSPEC_CALLED uint64_t cta_reduce(uint64_t value, uint64_t* slots) {
  const int thread = static_cast<int>(threadIdx.x);
  const Op op;
  value = warp_reduce(value, op);
  if (thread % kWarp == 0) slots[thread / kWarp] = value;
  __syncthreads();
  value = slots[0];
  POLYSPEC_UNROLL
  for (int warp = 1; warp < kWarps; ++warp) value = op(value, slots[warp]);
  return value;
}

template <int kWarps>
POLYSPEC_CALLED Scan cta_scan(uint64_t value, uint64_t* slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Scan of_warp = warp_scan_inline(value);
  if (lane == 0) slots[warp] = of_warp.total;
  __syncthreads();
  const Scan of_cta = warp_scan_inline(lane < kWarps ? slots[lane] : 0);
  return {of_warp.lower + __shfl_sync(kAllLanes, of_cta.lower, warp), of_cta.total};
}

template <int kThreads>
class CtaGroup {
  using Shared = CtaShared<kThreads>;
  static constexpr int kWarps = Shared::kWarps;

 public:
  __device__ __forceinline__ explicit CtaGroup(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ static constexpr int ctas() { return 1; }
  __device__ __forceinline__ static int rank() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static constexpr int size() { return kThreads; }
  __device__ __forceinline__ static int lane() { return rank() % kWarp; }
  __device__ __forceinline__ static constexpr int lanes() { return kWarp; }
  __device__ __forceinline__ static int team() { return rank() / kWarp; }
  __device__ __forceinline__ static constexpr int teams() { return kWarps; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }

  __device__ __forceinline__ void max_both(int32_t* first, int32_t* second) {
    BothLarger::unpack(reduce(BothLarger::pack(*first, *second), BothLarger{}), first, second);
  }
  __device__ __forceinline__ int64_t min(int64_t value) {
    return static_cast<int64_t>(reduce(static_cast<uint64_t>(value), Smaller{}));
  }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce(value, Plus{}); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) { return scan(value).lower; }
  __device__ __forceinline__ Scan scan(uint64_t value) {
    return cta_scan<kWarps>(value, next_slots());
  }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) { return warp_sum(value); }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value, uint64_t* total) {
    const Scan scan = warp_scan(value);
    *total = scan.total;
    return scan.lower;
  }
  __device__ __forceinline__ static void add(uint64_t* bin, uint64_t value) {
    add_to_bin(bin, value);
  }
  __device__ __forceinline__ Scratch& scratch() { return shared_.scratch; }
  __device__ __forceinline__ uint64_t* bins() { return shared_.scratch.bins; }
  __device__ __forceinline__ void clear_bins() {
    for (int bin = rank(); bin < kBins; bin += kThreads) shared_.scratch.bins[bin] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ uint64_t bin(int bin) const { return shared_.scratch.bins[bin]; }

  // The CTA of a group that ends what one CTA can do alone, and whether this is it.
  __device__ __forceinline__ CtaGroup& cta() { return *this; }
  __device__ __forceinline__ static constexpr bool leads() { return true; }
  __device__ __forceinline__ Candidates& candidates() { return shared_.candidates; }
  // Before a barrier and the first candidate.
  __device__ __forceinline__ void clear_candidates() {
    if (rank() == 0) shared_.candidates.count = 0;
  }
  // How many candidates there are, in the CTA that leads; -1: too many. A barrier.
  __device__ __forceinline__ int gather_candidates() {
    __syncthreads();
    const unsigned count = shared_.candidates.count;
    return count <= kMaxCandidates ? static_cast<int>(count) : -1;
  }

  // A bound that the kth largest of all threads' orders is not below, k <= size(): that one with
  // its low bits cleared.
  __device__ __forceinline__ static int32_t bound_of_largest(int32_t order, int k) {
    const uint32_t key = (static_cast<uint32_t>(order) ^ 0x80000000u) >> 16;
    uint32_t bound = 0;
    POLYSPEC_ROLLED
    for (uint32_t bit = 0x8000u; bit != 0; bit >>= 1) {
      if (__syncthreads_count(key >= (bound | bit)) >= k) bound |= bit;
    }
    return static_cast<int32_t>((bound << 16) ^ 0x80000000u);
  }

  // In every thread the reduction over the CTA.
  template <class Op>
  __device__ __forceinline__ uint64_t reduce(uint64_t value, Op) {
    return cta_reduce<kWarps, Op>(value, next_slots());
  }

 private:
  __device__ __forceinline__ uint64_t* next_slots() {
    buffer_ ^= 1;
    return shared_.slots[buffer_];
  }

  Shared& shared_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

}  // namespace polyspec::POLYSPEC_CORE
