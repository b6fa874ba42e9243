// The thread group of the CUDA backend: one CTA, whose teams are warps.
//
// All that is CUDA about the row algorithms is in this file: shuffles, barriers and shared memory.
// Reductions go warp first, then over one slot per warp. The slots are double-buffered, which saves
// the barrier after reading: a slot is written again two reductions later, and the barrier of the
// one in between has passed every reader.
#pragma once

#include "core/group.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

constexpr int kWarp = 32;

template <int kThreads>
struct CtaShared {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp,
                "whole warps, no more than one warp can reduce");
  Scratch scratch;
  uint64_t slots[2][kWarps];
};

// What reductions do with two values.
struct Smaller {
  __device__ __forceinline__ int64_t operator()(int64_t a, int64_t b) const {
    return a < b ? a : b;
  }
};
struct Plus {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
// The larger and the smaller of two orders in one word, so that one reduction does for both.
struct Extremes {
  __device__ __forceinline__ static uint64_t pack(int32_t high, int32_t low) {
    return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  }
  __device__ __forceinline__ static void unpack(uint64_t both, int32_t* high, int32_t* low) {
    *high = static_cast<int32_t>(both >> 32);
    *low = static_cast<int32_t>(both & 0xffffffffu);
  }
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const {
    int32_t high, low, other_high, other_low;
    unpack(a, &high, &low);
    unpack(b, &other_high, &other_low);
    return pack(high > other_high ? high : other_high, low < other_low ? low : other_low);
  }
};

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

  __device__ __forceinline__ void max_and_min(int32_t* high, int32_t* low) {
    Extremes::unpack(reduce(Extremes::pack(*high, *low), Extremes{}), high, low);
  }
  __device__ __forceinline__ int64_t min(int64_t value) { return reduce(value, Smaller{}); }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce(value, Plus{}); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    uint64_t unused;
    return exclusive_scan(value, &unused);
  }
  // The sum over the whole CTA as well.
  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value, uint64_t* total) {
    uint64_t of_warp;
    const uint64_t lower = team_exclusive_scan(value, &of_warp);
    uint64_t* slots = next_slots();
    if (lane() == 0) slots[team()] = of_warp;
    __syncthreads();
    const uint64_t in_lower_warps = team_exclusive_scan(lane() < kWarps ? slots[lane()] : 0, total);
    return lower + __shfl_sync(kAll, in_lower_warps, team());
  }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) {
    return warp_reduce(value, Plus{});
  }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value, uint64_t* total) {
    uint64_t inclusive = value;
    POLYSPEC_UNROLL
    for (int step = 1; step < kWarp; step *= 2) {
      const uint64_t below = __shfl_up_sync(kAll, inclusive, step);
      if (lane() >= step) inclusive += below;
    }
    *total = __shfl_sync(kAll, inclusive, kWarp - 1);
    return inclusive - value;
  }
  // Shared memory adds 32 bits in one instruction but 64 bits in a loop that fails under
  // contention, so the halves are added apart. Every wrap of the low half is somebody's carry, in
  // any order.
  __device__ __forceinline__ static void add(uint64_t* bin, uint64_t value) {
    unsigned* halves = reinterpret_cast<unsigned*>(bin);
    const unsigned low = static_cast<unsigned>(value);
    const unsigned before = atomicAdd(&halves[0], low);
    const unsigned carry = before + low < low ? 1 : 0;
    const unsigned high = static_cast<unsigned>(value >> 32) + carry;
    if (high != 0) atomicAdd(&halves[1], high);
  }
  // add(bin, 1) to a bin that stays below 2^32.
  __device__ __forceinline__ static void count(uint64_t* bin) {
    atomicAdd(reinterpret_cast<unsigned*>(bin), 1u);
  }
  __device__ __forceinline__ Scratch& scratch() { return shared_.scratch; }
  __device__ __forceinline__ uint64_t* bins() { return shared_.scratch.bins; }
  __device__ __forceinline__ void clear_bins() {
    for (int bin = rank(); bin < kBins; bin += kThreads) shared_.scratch.bins[bin] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ static void merge_bins() { __syncthreads(); }

  // In every thread the reduction over the CTA.
  template <class T, class Op>
  __device__ __forceinline__ T reduce(T value, Op op) {
    value = warp_reduce(value, op);
    uint64_t* slots = next_slots();
    if (lane() == 0) slots[team()] = static_cast<uint64_t>(value);
    __syncthreads();
    value = static_cast<T>(slots[0]);
    POLYSPEC_UNROLL
    for (int warp = 1; warp < kWarps; ++warp) value = op(value, static_cast<T>(slots[warp]));
    return value;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  template <class T, class Op>
  __device__ __forceinline__ static T warp_reduce(T value, Op op) {
    POLYSPEC_UNROLL
    for (int step = kWarp / 2; step > 0; step /= 2)
      value = op(value, __shfl_xor_sync(kAll, value, step));
    return value;
  }

  __device__ __forceinline__ uint64_t* next_slots() {
    buffer_ ^= 1;
    return shared_.slots[buffer_];
  }

  Shared& shared_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

}  // namespace polyspec::POLYSPEC_CORE
