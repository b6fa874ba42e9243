// A thread-block cluster as one thread group (sm_90 and later): a row is spread over up to eight
// multiprocessors, whose CTAs reach into each other's shared memory. A launch without a cluster
// dimension makes clusters of one CTA, which skip what is between CTAs.
//
// Every operation goes over the CTA first (cta_group.cuh), then over one slot per CTA: a CTA writes
// its value into its slot in the shared memory of each of the others, and all read their own copy.
// One cluster barrier per reduction; the slots are double-buffered as those of a CTA are. Scratch
// is that of CTA 0. Histograms are counted in each CTA's own shared memory and merged afterwards,
// since atomics on another CTA's would all queue at one multiprocessor.
#pragma once

#include "cuda/cta_group.cuh"
#include "cuda/launch_shape.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int kMaxCluster = polyspec::cuda::kMaxClusterCtas;  // one slot per CTA

template <int kThreads>
struct ClusterShared {
  CtaShared<kThreads> cta;
  uint64_t slots[2][kMaxCluster];
};

template <int kThreads>
class ClusterGroup {
  using Shared = ClusterShared<kThreads>;
  using Cta = CtaGroup<kThreads>;

 public:
  __device__ __forceinline__ explicit ClusterGroup(Shared& shared)
      : cta_(shared.cta),
        shared_(shared),
        index_(static_cast<int>(__clusterRelativeBlockRank())),
        ctas_(static_cast<int>(__clusterSizeInBlocks())) {}

  __device__ __forceinline__ int ctas() const { return ctas_; }
  __device__ __forceinline__ int rank() const { return index_ * kThreads + Cta::rank(); }
  __device__ __forceinline__ int size() const { return ctas_ * kThreads; }
  __device__ __forceinline__ static int lane() { return Cta::lane(); }
  __device__ __forceinline__ static constexpr int lanes() { return kWarp; }
  __device__ __forceinline__ int team() const { return index_ * Cta::teams() + Cta::team(); }
  __device__ __forceinline__ int teams() const { return ctas_ * Cta::teams(); }
  __device__ __forceinline__ void sync() const {
    if (ctas_ == 1) return __syncthreads();
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }

  __device__ __forceinline__ void max_and_min(int32_t* high, int32_t* low) {
    Extremes::unpack(reduce(Extremes::pack(*high, *low), Extremes{}), high, low);
  }
  __device__ __forceinline__ int64_t min(int64_t value) { return reduce(value, Smaller{}); }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce(value, Plus{}); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    uint64_t total;
    uint64_t lower = cta_.exclusive_scan(value, &total);
    if (ctas_ == 1) return lower;
    const uint64_t* totals = exchange(total);
    POLYSPEC_UNROLL
    for (int cta = 0; cta < kMaxCluster; ++cta) lower += cta < index_ ? totals[cta] : 0;
    return lower;
  }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) {
    return Cta::team_sum(value);
  }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value, uint64_t* total) {
    return Cta::team_exclusive_scan(value, total);
  }

  __device__ __forceinline__ Scratch& scratch() { return of_cta(&shared_, 0)->cta.scratch; }
  __device__ __forceinline__ uint64_t* bins() { return cta_.bins(); }
  __device__ __forceinline__ static void add(uint64_t* bin, uint64_t value) {
    Cta::add(bin, value);
  }
  __device__ __forceinline__ static void count(uint64_t* bin) { Cta::count(bin); }
  __device__ __forceinline__ void clear_bins() { cta_.clear_bins(); }
  __device__ __forceinline__ void merge_bins() {
    sync();
    if (ctas_ == 1) return;
    // A bin is one thread's: it reads all its counts before it writes the sum over that of CTA 0.
    POLYSPEC_ROLLED
    for (int bin = rank(); bin < kBins; bin += size()) {
      uint64_t sum = 0;
      POLYSPEC_ROLLED
      for (int cta = 0; cta < ctas_; ++cta) sum += of_cta(&shared_, cta)->cta.scratch.bins[bin];
      scratch().bins[bin] = sum;
    }
    sync();
  }

 private:
  // The same object in another CTA's shared memory.
  template <class T>
  __device__ __forceinline__ static T* of_cta(T* mine, int cta) {
    return static_cast<T*>(__cluster_map_shared_rank(mine, static_cast<unsigned>(cta)));
  }

  // What each CTA of the cluster gives, by CTA; `value` is the same in all threads of one.
  __device__ __forceinline__ const uint64_t* exchange(uint64_t value) {
    buffer_ ^= 1;
    uint64_t* slots = shared_.slots[buffer_];
    if (Cta::rank() < ctas_) of_cta(slots, Cta::rank())[index_] = value;
    sync();
    return slots;
  }

  template <class T, class Op>
  __device__ __forceinline__ T reduce(T value, Op op) {
    value = cta_.reduce(value, op);
    if (ctas_ == 1) return value;
    const uint64_t* values = exchange(static_cast<uint64_t>(value));
    value = static_cast<T>(values[0]);
    POLYSPEC_UNROLL
    for (int cta = 1; cta < kMaxCluster; ++cta)
      value = cta < ctas_ ? op(value, static_cast<T>(values[cta])) : value;
    return value;
  }

  Cta cta_;
  Shared& shared_;
  int index_;  // of this CTA in the cluster
  int ctas_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

}  // namespace polyspec::POLYSPEC_CORE
