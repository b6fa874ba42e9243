// Filters that end on the few tokens that they can keep: the CUDA backend's row_statistics.
//
// A bound is found below which the filters keep nothing, the tokens above it are copied into the
// shared memory of one CTA, and this CTA does the rest, tile sums included, while the others wait
// at a single barrier. Where the tokens are too many for that, the filters read the whole row.
//
// top-k: each thread has the largest logit of its share of the row, by the maximum's pass; the kth
// largest of a CTA's maxima is a lower bound of the kth largest of all logits.
// top-p: a histogram of the masses, 32 bins for each factor of two below the maximum.
// min-p: its threshold follows from the maximum.
#pragma once

#include "cuda/cta_group.cuh"
#include "cuda/row_reader.cuh"

namespace polyspec::POLYSPEC_CORE {

// Candidates as a row of type T, of which only they are there.
template <class T>
struct CandidateRow {
  const Candidates& candidates;
  int64_t n;
  int64_t vocab;
  using Element = Plain<T>;
  POLYSPEC_FN float operator[](int64_t i) const { return candidates.logits[i]; }
};

template <class Group, class T>
POLYSPEC_FN uint64_t sum_tiles(Group& group, int64_t n, const TokenMass<CandidateRow<T>>& weight) {
  const Tiling tiling(weight.row.vocab);
  uint64_t* tiles = group.scratch().tiles;
  for (int64_t tile = group.rank(); tile < tiling.count; tile += group.size()) tiles[tile] = 0;
  group.sync();
  uint64_t mine = 0;
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < n; i += group.size()) {
    const uint64_t mass = weight(i);
    group.add(&tiles[weight.row.candidates.tokens[i] / static_cast<uint32_t>(tiling.width)], mass);
    mine += mass;
  }
  return group.sum(mine);
}

constexpr float kOctaveBins = 32.0f;  // bins for each factor of two

// Adds the masses of the tokens from a bound on to bins by their factors of two below the maximum.
template <class T>
POLYSPEC_CALLED void count_octaves(TokenMass<Row<T>> weight, Worker worker, float bound,
                                   uint64_t* bins) {
  assume_global(weight.row.data);
  assume_shared(bins);
  visit_from(weight.row, worker, bound, [&](int64_t, float z) {
    const uint64_t mass = weight.of(z);
    if (mass == 0) return;  // else there are less than 63 factors of two
    const float octaves = __builtin_fabsf(z - weight.max) * weight.slope;
    add_to_bin(&bins[kBins - 1 - static_cast<int>(octaves * kOctaveBins)], mass);
  });
}

// Copies the tokens from a bound on.
template <class T>
POLYSPEC_CALLED void collect(Row<T> row, Worker worker, float bound, Candidates* candidates) {
  assume_global(row.data);
  assume_shared(candidates);
  visit_from(row, worker, bound, [&](int64_t i, float z) {
    const unsigned at = atomicAdd(&candidates->count, 1u);
    if (at >= kMaxCandidates) return;
    candidates->logits[at] = z;
    candidates->tokens[at] = static_cast<uint32_t>(i);
  });
}

// A bound below which top-p, of no other filter's tokens, keeps nothing; `whole` is the mass of all
// tokens. Collective.
template <class Group, class T>
POLYSPEC_FN float nucleus_bound(Group& group, const TokenMass<Row<T>>& weight, float top_p,
                                uint64_t whole) {
  const uint64_t need = share_of(top_p, whole);
  const double slope = static_cast<double>(weight.slope);
  // If no token below the bound has more than its share of the mass that may be cut, all of them
  // may be cut.
  const double share = static_cast<double>((whole - need) / static_cast<uint64_t>(weight.row.n));
  const int exponent = static_cast<int>(bit_cast<uint64_t>(share) >> 52) - 1023;
  const int below = exponent - (62 - weight.head) - 2;  // two factors of two for rounding
  const float least =
      share > 0.0
          ? static_cast<float>(static_cast<double>(weight.max) + static_cast<double>(below) / slope)
          : -kInfinity;
  group.clear_bins();
  count_octaves(weight, worker_of(group), least, group.bins());
  const int bin = kBins - 1 - bin_from_top(group, need).number;
  const double width = static_cast<double>(bin + 1) * (1.0 + 0x1p-20);  // with room for rounding
  return static_cast<float>(static_cast<double>(weight.max) -
                            width / (static_cast<double>(kOctaveBins) * slope));
}

// Whether the tokens from a bound on, below which the filters keep nothing, were few enough: the
// statistics are theirs then. `cut` and `whole` as of apply_filters. Collective.
template <class Group, class T>
POLYSPEC_FN bool filter_candidates(Group& group, const Row<T>& row, float bound,
                                   const Filter<>& filter, int head, bool cut, uint64_t whole,
                                   RowStatistics* statistics) {
  collect(row, worker_of(group), bound, &group.candidates());
  const int count = group.gather_candidates();
  if (count < 0) return false;
  uint64_t* found = group.scratch().found;
  if (group.leads()) {
    auto cta = group.alone();
    const CandidateRow<T> candidates{cta.candidates(), count, row.n};
    apply_filters(cta, candidates, filter, head, cut, whole, statistics);
    if (cta.rank() == 0) {
      found[0] = bit_cast<uint32_t>(statistics->threshold);
      found[1] = statistics->mass;
    }
  }
  group.sync();
  statistics->threshold = bit_cast<float>(static_cast<uint32_t>(found[0]));
  statistics->mass = found[1];
  return true;
}

template <class Group, class T>
POLYSPEC_FN int32_t row_statistics(Group& group, const Row<T>& row, const Filter<>& filter,
                                   int head, RowStatistics* statistics) {
  *statistics = {0.0f, -kInfinity, 0};
  group.clear_candidates();
  const bool cut = filter.top_k > 0 && filter.top_k < row.n;
  const bool bounded = cut && filter.top_k <= group.cta_size() / 2;
  int32_t most = largest_order(group, row);
  int32_t least = kOrderMinusInfinity;
  if (bounded) least = group.bound_of_largest(most, static_cast<int>(filter.top_k));
  group.max_both(&most, &least);
  const int32_t error = max_of_order(most, &statistics->max);
  if (error != 0) return error;
  float bound = -kInfinity;
  uint64_t whole = 0;
  if (cut) {
    if (least > kOrderMinusInfinity) bound = value_of(least);
  } else if (filter.top_p < 1.0f) {
    const TokenMass<Row<T>> weight = token_mass(row, *statistics, filter, head);
    whole = sum_tiles(group, row.n, weight);
    bound = nucleus_bound(group, weight, filter.top_p, whole);
  } else if (filter.min_p > 0.0f) {
    bound = min_p_threshold(filter, statistics->max);
  }
  if (bound > -kInfinity &&
      filter_candidates(group, row, bound, filter, head, cut, whole, statistics)) {
    return 0;
  }
  apply_filters(group, row, filter, head, cut, whole, statistics);
  return 0;
}

}  // namespace polyspec::POLYSPEC_CORE
