// The thread group of the CUDA backend: one CTA, whose teams are warps.
//
// All that is CUDA about the row algorithms is in this file: shuffles, barriers and shared memory.
// A CTest runs it on fibres that stand in for them. Reductions go warp first, then over one slot
// per warp. The slots are double-buffered, which saves the barrier after reading: a slot is written
// again two reductions later, and the barrier of the one in between has passed every reader.
#pragma once

#include "polyspec/detail/group.hpp"

#ifdef __CUDACC__
#define POLYSPEC_UNROLL _Pragma("unroll")
#else
#define POLYSPEC_UNROLL
#endif

namespace polyspec::POLYSPEC_DETAIL {

constexpr int kWarp = 32;

template <int kThreads>
struct CtaShared {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp,
                "whole warps, no more than one warp can reduce");
  Scratch scratch;
  uint64_t slots[2][kWarps];
};

template <int kThreads>
class CtaGroup {
  using Shared = CtaShared<kThreads>;
  static constexpr int kWarps = Shared::kWarps;

 public:
  static constexpr bool kSerial = false;

  __device__ __forceinline__ explicit CtaGroup(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ static int rank() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static constexpr int size() { return kThreads; }
  __device__ __forceinline__ static int lane() { return rank() % kWarp; }
  __device__ __forceinline__ static constexpr int lanes() { return kWarp; }
  __device__ __forceinline__ static int team() { return rank() / kWarp; }
  __device__ __forceinline__ static constexpr int teams() { return kWarps; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }

  __device__ __forceinline__ int32_t max(int32_t value) {
    return static_cast<int32_t>(reduce(static_cast<int64_t>(value), Larger{}));
  }
  __device__ __forceinline__ int32_t min(int32_t value) {
    return static_cast<int32_t>(reduce(static_cast<int64_t>(value), Smaller{}));
  }
  __device__ __forceinline__ int64_t min(int64_t value) { return reduce(value, Smaller{}); }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce(value, Plus{}); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    uint64_t total;
    const uint64_t lower = team_exclusive_scan(value, &total);
    uint64_t* slots = next_slots();
    if (lane() == 0) slots[team()] = total;
    __syncthreads();
    uint64_t unused;
    const uint64_t in_lower_warps =
        team_exclusive_scan(lane() < kWarps ? slots[lane()] : 0, &unused);
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
  __device__ __forceinline__ static void add(uint64_t* shared, uint64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(shared),
              static_cast<unsigned long long>(value));
  }
  __device__ __forceinline__ Scratch& scratch() { return shared_.scratch; }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  struct Larger {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
      return a > b ? a : b;
    }
  };
  struct Smaller {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
      return a < b ? a : b;
    }
  };
  struct Plus {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
      return a + b;
    }
  };

  template <class T, class Op>
  __device__ __forceinline__ static T warp_reduce(T value, Op op) {
    POLYSPEC_UNROLL
    for (int step = kWarp / 2; step > 0; step /= 2)
      value = op(value, __shfl_xor_sync(kAll, value, step));
    return value;
  }

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

  __device__ __forceinline__ uint64_t* next_slots() {
    buffer_ ^= 1;
    return shared_.slots[buffer_];
  }

  Shared& shared_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

}  // namespace polyspec::POLYSPEC_DETAIL
