// Residual masses with a subtracted share of the draft's distribution that depends on a token's
// bucket, the power of two of p/q (verify_tree.hpp, the block rule).
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

// The shares subtracted from q by bucket, and the sums of both masses.
struct BucketScales {
  double of[kBuckets];
  double p_total;
  double q_total;

  POLYSPEC_FN int64_t bucket(double p_mass, double q_mass) const {
    return bucket_of(p_mass, q_mass, p_total, q_total);
  }
};

// In no more than the 128 bytes that a function on the device takes in registers.
template <class T, Requests kind = Requests::kAny>
struct BucketWeight {
  TokenMass<Row<T>, Filter<kind>::kMayCut> p;
  TokenMass<DraftRow<T, kind>, Filter<kind>::kMayCut> q;
  double p_scale;
  double q_scale;
  const int32_t* target_to_draft;
  int64_t draft_vocab;
  const BucketScales* scales;  // instead of q_scale; nullptr: there is one bucket

  POLYSPEC_FN BucketWeight(const ResidualWeight<T, kind>& plain, const BucketScales* scales)
      : p(plain.p),
        q(plain.q),
        p_scale(plain.p_scale),
        q_scale(plain.q_scale),
        target_to_draft(plain.target_to_draft),
        draft_vocab(plain.draft_vocab),
        scales(scales) {}

  // With one bucket.
  POLYSPEC_FN ResidualWeight<T, kind> plain() const {
    return {p, q, p_scale, q_scale, mass_unit(p.head), target_to_draft, draft_vocab, -1};
  }
  POLYSPEC_FN double p_mass(int64_t i) const { return static_cast<double>(p(i)); }
  POLYSPEC_FN double q_mass(int64_t i) const {
    const int64_t j = target_to_draft != nullptr ? target_to_draft[i] : i;
    return j >= 0 && j < draft_vocab ? static_cast<double>(q(j)) : 0.0;
  }
  POLYSPEC_FN double draft_share(int64_t i) const {
    const double mass = q_mass(i);
    return mass * (scales != nullptr ? scales->of[scales->bucket(p_mass(i), mass)] : q_scale);
  }
  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    const double left = p_mass(i) * p_scale - draft_share(i);
    return left > 0.0 ? static_cast<uint64_t>(static_cast<int64_t>(left * mass_unit(p.head))) : 0;
  }
  POLYSPEC_FN bool keeps(int64_t i, double draw) const {
    const double whole = p_mass(i) * p_scale;
    return draw * whole < whole - draft_share(i);
  }
};

// The draft's masses by bucket, of which there are several, into memory that each part of the group
// has. Collective. (A backend may overload it for its rows.)
template <class Group, class T, Requests kind>
POLYSPEC_FN void count_buckets(Group& group, const BucketWeight<T, kind>& weight,
                               uint64_t* masses) {
  const int lanes = group.lanes();  // each adds to separate bins
  group.clear_bins();
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < weight.p.row.n; i += group.size()) {
    const double mass = weight.q_mass(i);
    const int64_t bucket = weight.scales->bucket(weight.p_mass(i), mass);
    if (mass > 0.0)
      group.add(&group.bins()[bucket * lanes + group.lane()], static_cast<uint64_t>(mass));
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
