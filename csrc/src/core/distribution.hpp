// The processed distribution of a row: temperature, top-k, top-p, min-p, as a RowStatistics.
#pragma once

#include "core/row.hpp"
#include "core/select.hpp"
#include "core/tiles.hpp"
#include "polyspec/status.hpp"

namespace polyspec::POLYSPEC_CORE {

// The kind of all requests of a call, as far as known at compile time: the more is known, the
// smaller the code. Results do not depend on it.
enum class Requests {
  kAny,
  kUnfiltered,  // no filter is set, and draft rows have the target's type
  kGreedy,      // temperature 0, no filter
};

// One request's sampling parameters, read and checked.
template <Requests kind = Requests::kAny>
struct Filter {
  static constexpr bool kMayCut = kind == Requests::kAny;
  float temperature;
  float slope;  // log2(e) / temperature; unused when greedy
  int64_t top_k;
  float top_p;
  float min_p;

  POLYSPEC_FN bool greedy() const { return kind == Requests::kGreedy || temperature == 0.0f; }
  POLYSPEC_FN bool cuts() const { return kMayCut && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }
};

// Mass of token i under a distribution: the integers of types.hpp. `kFiltered`: whether a filter
// may have set the threshold.
template <class RowType, bool kFiltered = true>
struct TokenMass {
  RowType row;
  float max;
  float threshold;
  float slope;
  int head;

  POLYSPEC_FN uint64_t operator()(int64_t i) const { return of(row[i]); }

  // Mass of a token with logit z.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 860 && __CUDA_ARCH__ != 890
  // The same integer in fewer instructions: scaling by a power of two is exact, and a conversion
  // truncates. (sm_86 and sm_89 convert to 64 bits at an eighth of the others' rate.)
  POLYSPEC_FN uint64_t of(float z) const { return static_cast<uint64_t>(filtered(z)); }
  // The same of a z that is no NaN where no filter has set a threshold, in fewer instructions.
  POLYSPEC_FN uint64_t unfiltered(float z) const { return static_cast<uint64_t>(share(z)); }
  // Both as doubles, which hold the 24 bits of a mass.
  POLYSPEC_FN double double_of(float z) const {
    return static_cast<double>(__builtin_truncf(filtered(z)));
  }
  POLYSPEC_FN double unfiltered_double(float z) const {
    return static_cast<double>(__builtin_truncf(share(z)));
  }
  POLYSPEC_FN float filtered(float z) const {
    const float all = share(z);  // no branch is worth less than it
    return z >= threshold ? all : 0.0f;
  }
  // Before it is truncated, for a z that is not NaN. The exponent is a product that saturates,
  // times -64: smaller exponents have no mass, and a product with a power of two has the same bits.
  POLYSPEC_FN float share(float z) const {
    const float unit = bit_cast<float>(static_cast<uint32_t>(127 + 62 - head) << 23);
    const float part = __saturatef(__builtin_fabsf(z - max) * (slope * 0x1p-6f));
    return exp2_of_64ths(part, unit);
  }
#else
  POLYSPEC_FN uint64_t of(float z) const { return mass_of_exponent(exponent_of(z), head); }
  POLYSPEC_FN double double_of(float z) const { return static_cast<double>(of(z)); }
  POLYSPEC_FN double unfiltered_double(float z) const { return double_of(z); }
  POLYSPEC_FN uint64_t unfiltered(float z) const { return of(z); }
#endif

  // A choice of exponents and no branch: code that uses two masses then still vectorises. -|z -
  // max| is z - max, since no logit exceeds the row's maximum. The caller's statistics may be
  // another row's, though, and a positive exponent would not give a mass at all. (The sign is the
  // slope's, which loops turn once.)
  POLYSPEC_FN float exponent_of(float z) const {
    return z >= threshold ? unfiltered_exponent(z) : -kInfinity;
  }
  POLYSPEC_FN float unfiltered_exponent(float z) const { return __builtin_fabsf(z - max) * -slope; }
};

template <class RowType, Requests kind>
POLYSPEC_FN TokenMass<RowType, Filter<kind>::kMayCut> token_mass(const RowType& row,
                                                                 const RowStatistics& statistics,
                                                                 const Filter<kind>& filter,
                                                                 int head) {
  return {row, statistics.max, statistics.threshold, filter.slope, head};
}

// The order of a logit, kOrderNan for a NaN of either sign.
POLYSPEC_FN int32_t order_or_nan(int32_t order) {
  return order < kOrderMinusInfinity ? kOrderNan : order;
}

// Largest order of the logits that this thread looks at, above all that of a NaN. (A backend may
// overload it for its rows, and first_of below.)
template <class Group, class RowType>
POLYSPEC_FN int32_t largest_order(Group& group, const RowType& row) {
  int32_t most = kOrderMinusInfinity;
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < row.n; i += group.size()) {
    const int32_t order = order_or_nan(order_of(row[i]));
    most = order > most ? order : most;
  }
  return most;
}

// The error bits of a row with this largest order, or 0, and its largest logit.
POLYSPEC_FN int32_t max_of_order(int32_t most, float* max) {
  *max = value_of(most) + 0.0f;  // -0 becomes +0
  if (most > kOrderInfinity) return kStatusNan;
  if (most == kOrderInfinity) return kStatusInf;
  return most == kOrderMinusInfinity ? kStatusEmptyRow : 0;
}

// Largest logit of a row, and the row's error bits. Collective.
template <class Group, class RowType>
POLYSPEC_FN int32_t row_max(Group& group, const RowType& row, float* max) {
  int32_t most = largest_order(group, row);
  int32_t unused = most;
  group.max_both(&most, &unused);
  return max_of_order(most, max);
}

// First of this thread's tokens with logit `max`; the row's length if there is none.
template <class Group, class RowType>
POLYSPEC_FN int64_t first_of(Group& group, const RowType& row, float max) {
  for (int64_t i = group.rank(); i < row.n; i += group.size()) {
    if (row[i] == max) return i;
  }
  return row.n;
}

// First token with the largest logit (C5). Collective.
template <class Group, class RowType>
POLYSPEC_FN int64_t first_equal(Group& group, const RowType& row, float max) {
  return group.min(first_of(group, row, max));
}

// Whether statistics can be of a row of n logits that holds a token with logit z and this mass > 0.
// Without reading the row no more can be checked: another row's may pass.
template <Requests kind>
POLYSPEC_FN bool possible_statistics(const RowStatistics& statistics, const Filter<kind>& filter,
                                     int head, int64_t n, float z, uint64_t own) {
  const uint64_t most = uint64_t{1} << (62 - head);  // the mass of the largest logit
  const uint64_t least = most + (z < statistics.max ? own : 0);
  return own > 0 && z <= statistics.max && statistics.max <= kLargest &&
         statistics.threshold <= statistics.max &&
         (filter.cuts() || statistics.threshold == -kInfinity) && statistics.mass >= least &&
         statistics.mass <= most * static_cast<uint64_t>(n);
}

struct One {
  POLYSPEC_FN uint64_t operator()(int64_t) const { return 1; }
};

// Smallest integer mass that is at least `share` of `total`, never 0: the likeliest token always
// stays.
POLYSPEC_FN uint64_t share_of(float share, uint64_t total) {
  const double wanted = static_cast<double>(share) * static_cast<double>(total);
  uint64_t mass = static_cast<uint64_t>(wanted);
  if (static_cast<double>(mass) < wanted) ++mass;
  if (mass > total) mass = total;
  return mass > 0 ? mass : 1;
}

// The least logit that min-p keeps: p(x) >= min_p * max p  <=>  z_x >= max + T log(min_p).
POLYSPEC_FN float min_p_threshold(const Filter<>& filter, float max) {
  const double share = static_cast<double>(filter.min_p);
  return static_cast<float>(static_cast<double>(max) +
                            static_cast<double>(filter.temperature) * portable_log(share));
}

// Threshold and mass of a row with a known maximum; its tile sums stay in scratch. The row may hold
// only the tokens that the filters of a larger row can keep; `cut`: whether top-k cuts the larger
// row, `whole`: the mass of all its tokens, or 0: the mass of this row's. Collective.
template <class Group, class RowType>
POLYSPEC_FN void apply_filters(Group& group, const RowType& row, const Filter<>& filter, int head,
                               bool cut, uint64_t whole, RowStatistics* statistics) {
  if (cut) {
    statistics->threshold = select_from_top(group, row, One{}, static_cast<uint64_t>(filter.top_k));
  }
  // Tokens left by top-k are summed for top-p, and tokens left by top-p and min-p once more: one
  // loop, since inlined the sum is the most of a kernel's code.
  POLYSPEC_ROLLED
  for (bool last = !(filter.top_p < 1.0f);; last = true) {
    if (last && filter.min_p > 0.0f) {
      const float threshold = min_p_threshold(filter, statistics->max);
      statistics->threshold = threshold > statistics->threshold ? threshold : statistics->threshold;
    }
    const TokenMass<RowType> kept = token_mass(row, *statistics, filter, head);
    const uint64_t total = last || whole == 0 ? sum_tiles(group, row.n, kept) : whole;
    if (last) {
      statistics->mass = total;
      return;
    }
    statistics->threshold = select_from_top(group, row, kept, share_of(filter.top_p, total));
  }
}

// The distribution of a row; returns error bits (0: *distribution is good). `head` is head_room of
// the vocabulary that the masses are meant for. Leaves the distribution's tile sums in scratch,
// ready for `pick`. Collective. Not for greedy requests. (A backend may overload it for its rows.)
template <class Group, class RowType, Requests kind>
POLYSPEC_FN int32_t row_statistics(Group& group, const RowType& row, const Filter<kind>& filter,
                                   int head, RowStatistics* statistics) {
  *statistics = {0.0f, -kInfinity, 0};
  const int32_t error = row_max(group, row, &statistics->max);
  if (error != 0) return error;
  if constexpr (Filter<kind>::kMayCut) {
    const bool cut = filter.top_k > 0 && filter.top_k < row.n;
    apply_filters(group, row, filter, head, cut, 0, statistics);
  } else {
    statistics->mass = sum_tiles(group, row.n, token_mass(row, *statistics, filter, head));
  }
  return 0;
}

// log p of a token with logit z, in a row of this maximum and mass.
POLYSPEC_CALLED float log_share(float z, float max, uint64_t mass, float temperature, int head) {
  const double scaled =
      (static_cast<double>(z) - static_cast<double>(max)) / static_cast<double>(temperature);
  return static_cast<float>(scaled - portable_log(static_cast<double>(mass) / mass_unit(head)));
}
template <Requests kind>
POLYSPEC_FN float log_probability(float z, const RowStatistics& statistics,
                                  const Filter<kind>& filter, int head) {
  return log_share(z, statistics.max, statistics.mass, filter.temperature, head);
}

}  // namespace polyspec::POLYSPEC_CORE
