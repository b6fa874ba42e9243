// The thread group of the CUDA backend: one CTA, with warps as teams.
//
// All CUDA code of the row algorithms is in this file: shuffles, barriers and shared memory.
// Reductions go warp first, then over one slot per warp. The slots are double-buffered, which saves
// the barrier after reading: a slot is written again two reductions later, and the barrier of the
// reduction in between has passed every reader.
#pragma once

#include "core/select.hpp"
#include "cuda/launch_shape.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

constexpr int kWarp = 32;
constexpr int kMaxCandidates = polyspec::cuda::kMaxCandidates;

// After a call the compiler no longer knows a pointer's address space.
POLYSPEC_FN void assume_global([[maybe_unused]] const void* pointer) {
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(pointer));
#endif
}
POLYSPEC_FN void assume_shared([[maybe_unused]] const void* pointer) {
#ifdef __CUDACC__
  __builtin_assume(__isShared(pointer));
#endif
}

// Tokens of a row that its filters may keep, in any order.
struct Candidates {
  alignas(16) float logits[kMaxCandidates];
  uint32_t tokens[kMaxCandidates];
  unsigned count;  // candidates that did not fit included
};

template <int kThreads>
struct CtaShared {
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp,
                "whole warps, no more than one warp can reduce");
  Scratch scratch;
  Candidates candidates;
  uint64_t slots[2][kWarps];
  int64_t picked;  // by one team
};

constexpr unsigned kAllLanes = 0xffffffffu;

// Operations of reductions: kNothing changes no value, and of_warp returns the result in every
// lane.
struct Smaller {
  static constexpr uint64_t kNothing = INT64_MAX;
  __device__ __forceinline__ static uint64_t of_warp(uint64_t value) {
    const int mine = static_cast<int>(value >> 32);
    const int high = __reduce_min_sync(kAllLanes, mine);
    const unsigned low =
        __reduce_min_sync(kAllLanes, mine == high ? static_cast<unsigned>(value) : ~0u);
    return static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 | low;
  }
};
struct Plus {
  static constexpr uint64_t kNothing = 0;
  // In parts of 22 bits, 32 of which add up to less than 2^32.
  __device__ __forceinline__ static uint64_t of_warp(uint64_t value) {
    constexpr uint64_t kPart = (1u << 22) - 1;
    const auto sum = [](uint64_t part) -> uint64_t {
      return __reduce_add_sync(kAllLanes, static_cast<unsigned>(part));
    };
    return sum(value & kPart) + (sum(value >> 22 & kPart) << 22) + (sum(value >> 44) << 44);
  }
};
// Two values in one word, so that one reduction finds the larger of both.
struct BothLarger {
  static constexpr uint64_t kNothing = 0x8000000080000000u;
  __device__ __forceinline__ static uint64_t pack(int32_t first, int32_t second) {
    return static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 |
           static_cast<uint32_t>(second);
  }
  __device__ __forceinline__ static void unpack(uint64_t both, int32_t* first, int32_t* second) {
    *first = static_cast<int32_t>(both >> 32);
    *second = static_cast<int32_t>(both & 0xffffffffu);
  }
  __device__ __forceinline__ static uint64_t of_warp(uint64_t both) {
    int32_t first, second;
    unpack(both, &first, &second);
    return pack(__reduce_max_sync(kAllLanes, first), __reduce_max_sync(kAllLanes, second));
  }
};

// Shared memory adds 32 bits in one instruction but 64 bits in a loop that fails under contention,
// so the halves are added apart. Every wrap of the low half is one thread's carry, in any order.
__device__ __forceinline__ void add_to_bin(uint64_t* bin, uint64_t value) {
  unsigned* halves = reinterpret_cast<unsigned*>(bin);
  const unsigned low = static_cast<unsigned>(value);
  const unsigned before = atomicAdd(&halves[0], low);
  const unsigned carry = before + low < low ? 1 : 0;
  const unsigned high = static_cast<unsigned>(value >> 32) + carry;
  if (high != 0) atomicAdd(&halves[1], high);
}

// The sum over lower ranks, and over all.
struct Scan {
  uint64_t lower, total;
};
__device__ __forceinline__ Scan scan_warp(uint64_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint64_t inclusive = value;
  POLYSPEC_ROLLED
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  return {inclusive - value, __shfl_sync(kAllLanes, inclusive, kWarp - 1)};
}

// In every thread the reduction over the CTA. slots: [kWarps]
template <int kWarps, class Op>
__device__ __forceinline__ uint64_t reduce_cta(uint64_t value, uint64_t* slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  value = Op::of_warp(value);
  if (lane == 0) slots[threadIdx.x / kWarp] = value;
  __syncthreads();
  return Op::of_warp(lane < kWarps ? slots[lane] : Op::kNothing);
}
template <int kWarps>
__device__ __forceinline__ Scan scan_cta(uint64_t value, uint64_t* slots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Scan of_warp = scan_warp(value);
  if (lane == 0) slots[warp] = of_warp.total;
  __syncthreads();
  const Scan of_cta = scan_warp(lane < kWarps ? slots[lane] : 0);
  return {of_warp.lower + __shfl_sync(kAllLanes, of_cta.lower, warp), of_cta.total};
}

// Not inlined, since kernels call them often.
POLYSPEC_CALLED uint64_t warp_sum(uint64_t value) { return Plus::of_warp(value); }
POLYSPEC_CALLED uint64_t warp_scan(uint64_t value) { return scan_warp(value).lower; }
template <int kWarps, class Op>
POLYSPEC_CALLED uint64_t cta_reduce(uint64_t value, uint64_t* slots) {
  return reduce_cta<kWarps, Op>(value, slots);
}
template <int kWarps>
POLYSPEC_CALLED uint64_t cta_scan(uint64_t value, uint64_t* slots) {
  return scan_cta<kWarps>(value, slots).lower;
}

// A team by itself.
struct Warp {
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ static constexpr int lanes() { return kWarp; }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) { return warp_sum(value); }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value) {
    return warp_scan(value);
  }
};

template <int kThreads>
class CtaGroup {
  using Shared = CtaShared<kThreads>;
  static constexpr int kWarps = Shared::kWarps;

 public:
  static constexpr int kEndings = 1;

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
    BothLarger::unpack(reduce<BothLarger>(BothLarger::pack(*first, *second)), first, second);
  }
  __device__ __forceinline__ int64_t min(int64_t value) {
    return static_cast<int64_t>(reduce<Smaller>(static_cast<uint64_t>(value)));
  }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce<Plus>(value); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    return cta_scan<kWarps>(value, next_slots());
  }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) { return warp_sum(value); }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value) {
    return warp_scan(value);
  }
  template <class F>
  __device__ __forceinline__ int64_t by_one_team(const F& f) {
    if (team() == 0) {
      const int64_t value = f();
      if (lane() == 0) shared_.picked = value;
    }
    __syncthreads();
    return shared_.picked;
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

  // This CTA as a group, whether it does the work that one CTA can do alone, and its threads.
  __device__ __forceinline__ CtaGroup alone() const { return *this; }
  __device__ __forceinline__ static constexpr bool leads() { return true; }
  __device__ __forceinline__ static constexpr int cta_size() { return kThreads; }
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

  // For a copy of this group that has reduced once.
  __device__ __forceinline__ void skip_reduction() { buffer_ ^= 1; }
  __device__ __forceinline__ void assume_shared_memory() const { assume_shared(&shared_); }

 private:
  template <class Op>
  __device__ __forceinline__ uint64_t reduce(uint64_t value) {
    return cta_reduce<kWarps, Op>(value, next_slots());
  }

  __device__ __forceinline__ uint64_t* next_slots() {
    buffer_ ^= 1;
    return shared_.slots[buffer_];
  }

  Shared& shared_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

// Not inlined, since filters look for bins often. By value, since references would force their
// objects into memory.
template <class AnyGroup>
POLYSPEC_CALLED Bin find_bin(AnyGroup group, uint64_t need) {
  group.assume_shared_memory();
  return bin_from_top<AnyGroup>(group, need);
}
template <int kThreads>
POLYSPEC_FN Bin bin_from_top(CtaGroup<kThreads>& group, uint64_t need) {
  const Bin found = find_bin(group, need);
  group.skip_reduction();
  return found;
}

}  // namespace polyspec::POLYSPEC_CORE
