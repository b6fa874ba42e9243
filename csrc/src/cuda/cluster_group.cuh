// A thread-block cluster as one thread group (sm_90 and later): a row is spread over up to eight
// multiprocessors, with CTAs that reach into each other's shared memory. A launch without a cluster
// dimension makes clusters of one CTA, which skip the exchange between CTAs.
//
// Every operation goes over the CTA first (cta_group.cuh), then over one slot per CTA: a CTA writes
// its value into its slot in the shared memory of each of the others, and each reads its copy. One
// cluster barrier per reduction; the slots are double-buffered as in a CTA. Scratch is CTA 0's.
// Histograms and candidates are per CTA and put together afterwards, since atomics on another CTA's
// memory would all queue at one multiprocessor.
#pragma once

#include "cuda/row_reader.cuh"

namespace polyspec::POLYSPEC_CORE {

constexpr int kMaxCluster = polyspec::cuda::kMaxClusterCtas;  // one slot per CTA

template <int kThreads>
struct ClusterShared {
  CtaShared<kThreads> cta;
  uint64_t slots[2][kMaxCluster];
};

// The same object in another CTA's shared memory.
template <class T>
__device__ __forceinline__ T* of_cta(T* mine, int cta) {
  return static_cast<T*>(__cluster_map_shared_rank(mine, static_cast<unsigned>(cta)));
}

__device__ __forceinline__ void meet_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// The values of a cluster's CTAs, by CTA; `value` is the same in all threads of one.
__device__ __forceinline__ const uint64_t* exchange(uint64_t value, uint64_t* slots, int index,
                                                    int ctas) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < ctas) of_cta(slots, thread)[index] = value;
  meet_cluster();
  return slots;
}

// Not inlined, since kernels call them often. `index` is that of this CTA.
POLYSPEC_CALLED void cluster_sync(int ctas) {
  if (ctas == 1) return __syncthreads();
  meet_cluster();
}
template <class Op, int kThreads>
POLYSPEC_CALLED uint64_t cluster_reduce(uint64_t value, ClusterShared<kThreads>* shared, int buffer,
                                        int index, int ctas) {
  assume_shared(shared);
  value = reduce_cta<kThreads / kWarp, Op>(value, shared->cta.slots[buffer]);
  if (ctas == 1) return value;
  const uint64_t* values = exchange(value, shared->slots[buffer], index, ctas);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return Op::of_warp(lane < ctas ? values[lane] : Op::kNothing);
}
template <int kThreads>
POLYSPEC_CALLED uint64_t cluster_scan(uint64_t value, ClusterShared<kThreads>* shared, int buffer,
                                      int index, int ctas) {
  assume_shared(shared);
  const Scan scan = scan_cta<kThreads / kWarp>(value, shared->cta.slots[buffer]);
  if (ctas == 1) return scan.lower;
  const uint64_t* totals = exchange(scan.total, shared->slots[buffer], index, ctas);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return scan.lower + Plus::of_warp(lane < index ? totals[lane] : 0);
}

template <int kThreads>
class ClusterGroup {
  using Shared = ClusterShared<kThreads>;
  using Cta = CtaGroup<kThreads>;

 public:
  static constexpr int kEndings = 1;

  __device__ __forceinline__ explicit ClusterGroup(Shared& shared)
      : ClusterGroup(shared, static_cast<int>(__clusterRelativeBlockRank()),
                     static_cast<int>(__clusterSizeInBlocks())) {}

  __device__ __forceinline__ int ctas() const { return ctas_; }
  __device__ __forceinline__ int rank() const { return index_ * kThreads + Cta::rank(); }
  __device__ __forceinline__ int size() const { return ctas_ * kThreads; }
  __device__ __forceinline__ static int lane() { return Cta::lane(); }
  __device__ __forceinline__ static constexpr int lanes() { return kWarp; }
  __device__ __forceinline__ int team() const { return index_ * Cta::teams() + Cta::team(); }
  __device__ __forceinline__ int teams() const { return ctas_ * Cta::teams(); }
  __device__ __forceinline__ void sync() const { cluster_sync(ctas_); }

  __device__ __forceinline__ void max_both(int32_t* first, int32_t* second) {
    BothLarger::unpack(reduce<BothLarger>(BothLarger::pack(*first, *second)), first, second);
  }
  __device__ __forceinline__ int64_t min(int64_t value) {
    return static_cast<int64_t>(reduce<Smaller>(static_cast<uint64_t>(value)));
  }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce<Plus>(value); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    buffer_ ^= 1;
    return cluster_scan(value, &shared_, buffer_, index_, ctas_);
  }
  __device__ __forceinline__ static uint64_t team_sum(uint64_t value) {
    return Cta::team_sum(value);
  }
  __device__ __forceinline__ static uint64_t team_exclusive_scan(uint64_t value) {
    return Cta::team_exclusive_scan(value);
  }

  // Each CTA does it, which takes less than a barrier of the cluster.
  template <class F>
  __device__ __forceinline__ int64_t by_one_team(const F& f) const {
    return Cta(shared_.cta).by_one_team(f);
  }

  __device__ __forceinline__ Scratch& scratch() { return of_cta(&shared_, 0)->cta.scratch; }
  __device__ __forceinline__ uint64_t* bins() { return shared_.cta.scratch.bins; }
  __device__ __forceinline__ static void add(uint64_t* bin, uint64_t value) {
    Cta::add(bin, value);
  }
  __device__ __forceinline__ void clear_bins() { Cta(shared_.cta).clear_bins(); }
  __device__ __forceinline__ uint64_t bin(int bin) const {
    uint64_t sum = 0;
    POLYSPEC_ROLLED
    for (int cta = 0; cta < ctas_; ++cta) sum += of_cta(&shared_, cta)->cta.scratch.bins[bin];
    return sum;
  }

  __device__ __forceinline__ ClusterGroup alone() const { return {shared_, 0, 1}; }
  __device__ __forceinline__ bool leads() const { return index_ == 0; }
  __device__ __forceinline__ static constexpr int cta_size() { return kThreads; }
  __device__ __forceinline__ Candidates& candidates() { return shared_.cta.candidates; }
  __device__ __forceinline__ void clear_candidates() { Cta(shared_.cta).clear_candidates(); }
  __device__ __forceinline__ static int32_t bound_of_largest(int32_t order, int k) {
    return Cta::bound_of_largest(order, k);
  }
  __device__ __forceinline__ int gather_candidates() {
    if (ctas_ == 1) return Cta(shared_.cta).gather_candidates();
    __syncthreads();
    buffer_ ^= 1;
    const uint64_t* counts =
        exchange(shared_.cta.candidates.count, shared_.slots[buffer_], index_, ctas_);
    uint64_t all = 0;
    for (int cta = 0; cta < ctas_; ++cta) all += counts[cta];
    if (all > kMaxCandidates) return -1;
    if (leads()) {
      Candidates& mine = shared_.cta.candidates;
      int at = static_cast<int>(counts[0]);
      POLYSPEC_ROLLED
      for (int cta = 1; cta < ctas_; ++cta) {
        const Candidates& theirs = of_cta(&shared_, cta)->cta.candidates;
        const int count = static_cast<int>(counts[cta]);
        POLYSPEC_ROLLED
        for (int i = Cta::rank(); i < count; i += kThreads) {
          mine.logits[at + i] = theirs.logits[i];
          mine.tokens[at + i] = theirs.tokens[i];
        }
        at += count;
      }
      __syncthreads();
    }
    return static_cast<int>(all);
  }

  __device__ __forceinline__ void skip_reduction() { buffer_ ^= 1; }
  __device__ __forceinline__ void assume_shared_memory() const { assume_shared(&shared_); }

 private:
  __device__ __forceinline__ ClusterGroup(Shared& shared, int index, int ctas)
      : shared_(shared), index_(index), ctas_(ctas) {}

  template <class Op>
  __device__ __forceinline__ uint64_t reduce(uint64_t value) {
    buffer_ ^= 1;
    return cluster_reduce<Op>(value, &shared_, buffer_, index_, ctas_);
  }

  Shared& shared_;
  int index_;  // of this CTA in the cluster
  int ctas_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

template <int kThreads>
POLYSPEC_FN Bin bin_from_top(ClusterGroup<kThreads>& group, uint64_t need) {
  const Bin found = find_bin(group, need);
  group.skip_reduction();
  return found;
}
template <int kThreads, class Weight>
POLYSPEC_FN Drawn draw_residual(ClusterGroup<kThreads>& group, const Weight& weight, bool wanted,
                                uint64_t bits) {
  const Drawn drawn = residual_pass(group, weight, wanted, bits);
  group.skip_reduction();
  return drawn;
}

}  // namespace polyspec::POLYSPEC_CORE
