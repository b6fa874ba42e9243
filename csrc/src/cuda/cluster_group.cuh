// A thread-block cluster as one thread group (sm_90 and later): a row is spread over up to eight
// multiprocessors, whose CTAs reach into each other's shared memory. A launch without a cluster
// dimension makes clusters of one CTA, which skip what is between CTAs.
//
// Every operation goes over the CTA first (cta_group.cuh), then over one slot per CTA: a CTA writes
// its value into its slot in the shared memory of each of the others, and all read their own copy.
// One cluster barrier per reduction; the slots are double-buffered as those of a CTA are. Scratch
// is that of CTA 0. Histograms and candidates are those of each CTA and put together afterwards,
// since atomics on another CTA's memory would all queue at one multiprocessor.
#pragma once

#include "cuda/cta_group.cuh"

namespace polyspec::POLYSPEC_CORE {

constexpr int kMaxCluster = polyspec::cuda::kMaxClusterCtas;  // one slot per CTA

template <int kThreads>
struct ClusterShared {
  CtaShared<kThreads> cta;
  uint64_t slots[2][kMaxCluster];
};

// A value and the first `count` of those of the CTAs: [kMaxCluster]
template <class Op>
POLYSPEC_CALLED uint64_t combine(uint64_t value, const uint64_t* of_ctas, int count) {
  const Op op;
  POLYSPEC_UNROLL
  for (int cta = 0; cta < kMaxCluster; ++cta) value = cta < count ? op(value, of_ctas[cta]) : value;
  return value;
}

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

  __device__ __forceinline__ void max_both(int32_t* first, int32_t* second) {
    BothLarger::unpack(reduce(BothLarger::pack(*first, *second), BothLarger{}), first, second);
  }
  __device__ __forceinline__ int64_t min(int64_t value) {
    return static_cast<int64_t>(reduce(static_cast<uint64_t>(value), Smaller{}));
  }
  __device__ __forceinline__ uint64_t sum(uint64_t value) { return reduce(value, Plus{}); }

  __device__ __forceinline__ uint64_t exclusive_scan(uint64_t value) {
    const Scan scan = cta_.scan(value);
    if (ctas_ == 1) return scan.lower;
    return scan.lower + combine<Plus>(0, exchange(scan.total), index_);
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
  __device__ __forceinline__ void clear_bins() { cta_.clear_bins(); }
  __device__ __forceinline__ uint64_t bin(int bin) const {
    uint64_t sum = 0;
    POLYSPEC_ROLLED
    for (int cta = 0; cta < ctas_; ++cta) sum += of_cta(&shared_, cta)->cta.scratch.bins[bin];
    return sum;
  }

  __device__ __forceinline__ Cta& cta() { return cta_; }
  __device__ __forceinline__ bool leads() const { return index_ == 0; }
  __device__ __forceinline__ void clear_candidates() { cta_.clear_candidates(); }
  __device__ __forceinline__ int gather_candidates() {
    if (ctas_ == 1) return cta_.gather_candidates();
    __syncthreads();
    const uint64_t* counts = exchange(shared_.cta.candidates.count);
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

  template <class Op>
  __device__ __forceinline__ uint64_t reduce(uint64_t value, Op op) {
    value = cta_.reduce(value, op);
    if (ctas_ == 1) return value;
    const uint64_t* values = exchange(value);
    return combine<Op>(values[0], values + 1, ctas_ - 1);
  }

  Cta cta_;
  Shared& shared_;
  int index_;  // of this CTA in the cluster
  int ctas_;
  int buffer_ = 0;  // the same in every thread, since reductions are collective
};

}  // namespace polyspec::POLYSPEC_CORE
