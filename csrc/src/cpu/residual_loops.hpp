// Residual masses over a range of a row: the masses of ResidualWeight (verify_parts.hpp), in loops
// that vectorise. Draft rows may have another element type, a smaller vocabulary or a map, or there
// may be none.
#pragma once

#include <algorithm>

#include "core/bucket_weight.hpp"
#include "cpu/row_loops.hpp"
#include "cpu/serial_group.hpp"

namespace polyspec::POLYSPEC_CORE {

// The same residual's masses over another view of the target's row.
template <class From, class To>
POLYSPEC_FN ResidualWeight<To> over(const ResidualWeight<From>& weight, const Row<To>& row) {
  return {over(weight.p, row),    weight.q,           weight.p_scale, weight.q_scale, weight.unit,
          weight.target_to_draft, weight.draft_vocab, weight.proposed};
}

// Where the draft has nothing: scale * p alone.
template <class T>
struct TargetPart {
  RealDistribution<T> p;
  double p_scale;

  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    return truncated(p.floor_of(i) * p_scale * static_cast<double>(p.unit));
  }
};

// Draft and target side by side in one vocabulary.
template <class T, class U>
struct BothParts {
  RealDistribution<T> p;
  RealDistribution<U> q;
  double p_scale;
  double q_scale;

  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    const double left = p.floor_of(i) * p_scale - q.floor_of(i) * q_scale;
    // The clamp comes before the conversion, which could not be speculated otherwise.
    return truncated((left > 0.0 ? left : 0.0) * static_cast<double>(p.unit));
  }
};

template <class T, class U>
POLYSPEC_FN BothParts<T, U> both_parts(const ResidualWeight<T>& weight, const Row<T>& p,
                                       const Row<U>& q) {
  return {RealDistribution(over(weight.p, p)), RealDistribution(over(weight.q, q)), weight.p_scale,
          weight.q_scale};
}

// The draft's logits of n target ids, -inf (mass 0) where the draft cannot propose the id.
template <class U>
POLYSPEC_LOOP void gather_loop(const U* data, int64_t draft_vocab, const int32_t* map, int64_t n,
                               float* logits) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t j = map[i];
    logits[i] = j >= 0 && j < draft_vocab ? to_float(data[j]) : -kInfinity;
  }
}

template <class T>
POLYSPEC_FN uint64_t mapped_mass(const ResidualWeight<T>& weight, int64_t begin, int64_t end) {
  constexpr int64_t kGathered = 512;
  float logits[kGathered];
  uint64_t sum = 0;
  for (; begin < end; begin += kGathered) {
    const int64_t n = std::min(kGathered, end - begin);
    with_type(weight.q.row, [&](const auto& row) {
      gather_loop(row.data, weight.draft_vocab, weight.target_to_draft + begin, n, logits);
    });
    const Row<T> target = part_of(weight.p.row, begin, n);
    sum += sum_loop(both_parts(weight, target, Row<float>{logits, n}), 0, n);
  }
  return sum;
}

template <class T>
POLYSPEC_LOOP uint64_t typed_mass(const ResidualWeight<T>& weight, int64_t begin, int64_t end) {
  const bool one_hot = weight.proposed >= 0;
  if (!fits_vectors(weight.p.head)) return sum_loop(weight, begin, end);
  const TargetPart<T> alone{RealDistribution(weight.p), weight.p_scale};
  if (one_hot) {
    const int64_t y = weight.proposed;
    const uint64_t sum = sum_loop(alone, begin, end);
    return begin <= y && y < end ? sum - alone(y) + weight(y) : sum;
  }
  if (weight.target_to_draft != nullptr) return mapped_mass(weight, begin, end);
  const int64_t shared = std::clamp(weight.draft_vocab, begin, end);
  uint64_t sum = shared < end ? sum_loop(alone, shared, end) : 0;
  with_type(weight.q.row, [&](const auto& row) {
    sum += sum_loop(both_parts(weight, weight.p.row, row), begin, shared);
  });
  return sum;
}

// The rest of a masked row's residual from `begin` on, over a copy of n logits of it.
template <class T>
POLYSPEC_FN ResidualWeight<T> residual_part(const ResidualWeight<Masked<T>>& weight, int64_t begin,
                                            const T* block, int64_t n) {
  ResidualWeight<T> part = over(weight, Row<T>{block, n});
  if (weight.proposed >= 0) {
    const int64_t y = weight.proposed - begin;
    part.proposed = y >= 0 && y < n ? y : n;  // n: in another block
  } else if (weight.target_to_draft != nullptr) {
    part.target_to_draft += begin;
  } else {
    const int64_t gone = std::min(begin, weight.draft_vocab);
    part.draft_vocab -= gone;
    part.q.row = {weight.q.row.data + gone, weight.q.row.n - gone};
  }
  return part;
}

template <class T>
uint64_t typed_mass(const ResidualWeight<Masked<T>>& weight, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  over_blocks(weight.p.row, begin, end, [&](const T* block, int64_t n) {
    sum += typed_mass(residual_part(weight, begin, block, n), int64_t{0}, n);
    begin += n;
  });
  return sum;
}

// f(weight) with the element type of the target's row as a template argument.
template <class T, class F>
POLYSPEC_FN auto with_type(const ResidualWeight<T>& weight, const F& f) {
  return with_type(weight.p.row, [&](const auto& row) { return f(over(weight, row)); });
}

template <class T>
uint64_t mass_between(const ResidualWeight<T>& weight, int64_t begin, int64_t end) {
  return with_type(weight, [&](const auto& typed) { return typed_mass(typed, begin, end); });
}

// ---- Buckets of p/q ----

template <class T, class U>
struct BucketParts {
  RealDistribution<T> p;
  RealDistribution<U> q;
  double p_scale;
  BucketScales scales;

  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    const double p_mass = p.floor_of(i);
    const double q_mass = q.floor_of(i);
    const double left = p_mass * p_scale - q_mass * scales.of[scales.bucket(p_mass, q_mass)];
    return truncated((left > 0.0 ? left : 0.0) * static_cast<double>(p.unit));
  }
};

template <class T, class U>
POLYSPEC_FN BucketParts<T, U> bucket_parts(const BucketWeight<T>& weight, const Row<U>& q) {
  return {RealDistribution(weight.p), RealDistribution(over(weight.q, q)), weight.p_scale,
          *weight.scales};
}

// Masses of the draft and their buckets, side by side.
template <class T, class U>
POLYSPEC_LOOP void bucket_loop(const BucketParts<T, U>& given, int64_t begin, int64_t n,
                               double* masses, int64_t* buckets) {
  const BucketParts<T, U> parts = given;
  for (int64_t i = 0; i < n; ++i) {
    masses[i] = parts.q.floor_of(begin + i);
    buckets[i] = parts.scales.bucket(parts.p.floor_of(begin + i), masses[i]);
  }
}

template <class T>
uint64_t typed_mass(const BucketWeight<T>& weight, int64_t begin, int64_t end) {
  if (!fits_vectors(weight.p.head) || weight.target_to_draft != nullptr)
    return sum_loop(weight, begin, end);
  const int64_t shared = std::clamp(weight.draft_vocab, begin, end);
  uint64_t sum = shared < end ? typed_mass(weight.plain(), shared, end) : 0;
  with_type(weight.q.row,
            [&](const auto& row) { sum += sum_loop(bucket_parts(weight, row), begin, shared); });
  return sum;
}

template <class T>
uint64_t typed_mass(const BucketWeight<Masked<T>>& weight, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  over_blocks(weight.p.row, begin, end, [&](const T* block, int64_t n) {
    const BucketWeight<T> part{residual_part(weight.plain(), begin, block, n), weight.scales};
    sum += typed_mass(part, int64_t{0}, n);
    begin += n;
  });
  return sum;
}

template <class T>
uint64_t mass_between(const BucketWeight<T>& weight, int64_t begin, int64_t end) {
  const ResidualWeight<T> plain = weight.plain();
  if (weight.scales == nullptr) return mass_between(plain, begin, end);
  return with_type(plain, [&](const auto& typed) {
    return typed_mass(BucketWeight(typed, weight.scales), begin, end);
  });
}

template <class T>
void count_typed(const BucketWeight<T>& weight, uint64_t* masses) {
  constexpr int64_t kAtOnce = 512;
  double counted[kAtOnce];
  int64_t buckets[kAtOnce];
  std::fill_n(masses, kBuckets, uint64_t{0});
  with_type(weight.q.row, [&](const auto& row) {
    const auto parts = bucket_parts(weight, row);
    for (int64_t begin = 0; begin < row.n; begin += kAtOnce) {
      const int64_t n = std::min(kAtOnce, row.n - begin);
      bucket_loop(parts, begin, n, counted, buckets);
      for (int64_t i = 0; i < n; ++i) masses[buckets[i]] += static_cast<uint64_t>(counted[i]);
    }
  });
}

template <class T>
void count_buckets(SerialGroup& group, const BucketWeight<T>& weight, uint64_t* masses) {
  if constexpr (!kIsMasked<T>) {
    if (fits_vectors(weight.p.head) && weight.target_to_draft == nullptr) {
      return with_type(weight.plain(), [&](const auto& typed) {
        count_typed(BucketWeight(typed, weight.scales), masses);
      });
    }
  }
  count_buckets<SerialGroup, T, Requests::kAny>(group, weight, masses);
}

}  // namespace polyspec::POLYSPEC_CORE
