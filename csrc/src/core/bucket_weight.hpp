// Residual masses of which what is taken from the draft's distribution depends on a token's bucket,
// the power of two of p/q (verify_tree.hpp, the block rule).
#pragma once

#include "core/verify_parts.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int kBuckets = 16;

// The bucket of a token with these masses, whole numbers, of these totals. The exponent of a
// quotient of doubles is the difference of their bits, shifted: no division, and no logarithm.
POLYSPEC_FN int64_t bucket_of(double p_mass, double q_mass, double p_total, double q_total) {
  const int64_t exponent =
      (bit_cast<int64_t>(p_mass * q_total) - bit_cast<int64_t>(q_mass * p_total)) >> 52;
  const int64_t bucket = exponent + kBuckets / 2;
  const int64_t above = bucket > 0 ? bucket : 0;
  return above < kBuckets - 1 ? above : kBuckets - 1;
}

template <class T, Requests kind = Requests::kAny>
struct BucketWeight : ResidualWeight<T, kind> {
  const double* scales;  // of q by bucket, in place of q_scale; nullptr: there is one bucket
  double p_total;
  double q_total;

  POLYSPEC_FN double q_mass(int64_t i) const {
    const int64_t j = this->target_to_draft != nullptr ? this->target_to_draft[i] : i;
    return j >= 0 && j < this->draft_vocab ? static_cast<double>(this->q(j)) : 0.0;
  }
  POLYSPEC_FN int64_t bucket(int64_t i) const {
    return bucket_of(static_cast<double>(this->p(i)), q_mass(i), p_total, q_total);
  }
  POLYSPEC_FN double draft_share(int64_t i) const {
    return q_mass(i) * (scales != nullptr ? scales[bucket(i)] : this->q_scale);
  }
  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    const double left = static_cast<double>(this->p(i)) * this->p_scale - draft_share(i);
    return left > 0.0 ? static_cast<uint64_t>(static_cast<int64_t>(left * this->unit)) : 0;
  }
  POLYSPEC_FN bool keeps(int64_t i, double draw) const {
    const double whole = static_cast<double>(this->p(i)) * this->p_scale;
    return draw * whole < whole - draft_share(i);
  }
};

// The draft's masses by bucket, into memory that each part of the group has. Collective. (A backend
// may overload it for its rows.)
template <class Group, class T, Requests kind>
POLYSPEC_FN void count_buckets(Group& group, const BucketWeight<T, kind>& weight,
                               uint64_t* masses) {
  const int lanes = group.lanes();  // each adds to bins of its own
  group.clear_bins();
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < weight.p.row.n; i += group.size()) {
    const uint64_t mass = static_cast<uint64_t>(weight.q_mass(i));
    if (mass > 0) group.add(&group.bins()[weight.bucket(i) * lanes + group.lane()], mass);
  }
  group.sync();
  group.by_one_team([&] {
    POLYSPEC_ROLLED
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      const uint64_t mass = group.team_sum(group.bin(bucket * lanes + group.lane()));
      if (group.lane() == 0) masses[bucket] = mass;
    }
    return int64_t{0};
  });
  group.sync();  // the bins may be cleared
}

}  // namespace polyspec::POLYSPEC_CORE
