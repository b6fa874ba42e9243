// The loops of the CPU backend over a range of one row: maxima, masses, keys.
//
// Each is a separate function, never inlined, over one element type, and works on copies of its
// arguments. Inlined into a whole request the compiler keeps the per-element conditions as
// branches and gives up on vectors, which costs a factor of twenty. Their callers are compiled
// once, for rows of any type: these loops dispatch on the type, once per range.
#pragma once

#include "core/distribution.hpp"

#define POLYSPEC_LOOP __attribute__((noinline))

namespace polyspec::POLYSPEC_CORE {

// ---- Masses in vector registers ----
//
// A mass has 24 significant bits, so that as a float it is exact: trunc(2^x * unit) is the integer
// of mass_of_exponent, in fewer operations than shifting 64-bit integers about. Without a rounding
// instruction (x86 before AVX2) the plain weights are faster.

#if !defined(__x86_64__) || defined(__AVX2__)
constexpr bool kRoundsInVectors = true;
#else
constexpr bool kRoundsInVectors = false;
#endif

// AVX2 has no conversion to 64-bit integers; in [2^52, 2^53) a double's low bits are an integer.
#if defined(__x86_64__) && !defined(__AVX512DQ__)
constexpr int kVectorHead = 11;  // masses stay below 2^52
POLYSPEC_FN uint64_t truncated(double value) {
  constexpr double kTwo52 = 4503599627370496.0;
  constexpr uint64_t kTwo52Bits = 0x4330000000000000u;
  return bit_cast<uint64_t>(__builtin_floor(value) + kTwo52) - kTwo52Bits;
}
#else
constexpr int kVectorHead = 0;
template <class Real>
POLYSPEC_FN uint64_t truncated(Real value) {
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}
#endif

// Whether masses with this head room may go through floating point.
POLYSPEC_FN bool fits_vectors(int head) { return kRoundsInVectors && head >= kVectorHead; }

// The masses of TokenMass: trunc(of(i)). `kCut`: whether a filter may have set a threshold.
template <class T, bool kCut = true>
struct RealDistribution {
  TokenMass<Row<T>> statistics;
  float unit;

  POLYSPEC_FN explicit RealDistribution(const TokenMass<Row<T>>& weight)
      : statistics(weight), unit(static_cast<float>(mass_unit(weight.head))) {}

  POLYSPEC_FN float of(int64_t i) const {
    const float z = statistics.row[i];
    return exp2_of(kCut ? statistics.exponent_of(z) : statistics.unfiltered_exponent(z), unit);
  }
  POLYSPEC_FN double floor_of(int64_t i) const {
    return static_cast<double>(__builtin_floorf(of(i)));
  }
  POLYSPEC_FN uint64_t operator()(int64_t i) const { return truncated(of(i)); }
};

// f(the masses of a distribution as it is).
template <class T, class F>
POLYSPEC_FN auto with_cut(const TokenMass<Row<T>>& weight, const F& f) {
  return weight.threshold > -kInfinity ? f(RealDistribution<T>(weight))
                                       : f(RealDistribution<T, false>(weight));
}

// ---- Loops over one element type ----

template <class Weight>
POLYSPEC_LOOP uint64_t sum_loop(const Weight& given, int64_t begin, int64_t end) {
  const Weight weight = given;
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += weight(i);
  return sum;
}

template <class Weight>
POLYSPEC_LOOP void mass_loop(const Weight& given, int64_t begin, int64_t n, uint64_t* masses) {
  const Weight weight = given;
  for (int64_t i = 0; i < n; ++i) masses[i] = weight(begin + i);
}

struct Extremes {
  int32_t high, low;  // orders, see order_of
};

// Of 16 bits the order of the halves themselves, converted at the end.
template <class T>
POLYSPEC_FN int16_t order_of_half(T value) {
  const int16_t bits = static_cast<int16_t>(value.bits);
  return static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff));
}
template <class T>
POLYSPEC_FN int32_t order_of_order(int16_t order) {
  const int16_t bits = static_cast<int16_t>(order ^ ((order >> 15) & 0x7fff));
  return order_of(to_float(T{static_cast<uint16_t>(bits)}));
}
template <class T>
POLYSPEC_LOOP Extremes half_extremes_loop(const T* data, int64_t n) {
  int16_t high = order_of_half(data[0]);
  int16_t low = high;
  for (int64_t i = 1; i < n; ++i) {
    const int16_t order = order_of_half(data[i]);
    high = order > high ? order : high;
    low = order < low ? order : low;
  }
  return {order_of_order<T>(high), order_of_order<T>(low)};
}

// Of n >= 1 elements.
template <class T>
POLYSPEC_LOOP Extremes extremes_loop(const T* data, int64_t n) {
  if constexpr (sizeof(T) == 2) return half_extremes_loop(data, n);
  int32_t high = kOrderMinusInfinity;
  int32_t low = kOrderInfinity;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t order = order_of(to_float(data[i]));
    high = order > high ? order : high;
    low = order < low ? order : low;
  }
  return {high, low};
}

template <class T>
POLYSPEC_LOOP bool any_equal_loop(const T* data, int64_t n, float value) {
  uint32_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= to_float(data[i]) == value ? 1u : 0u;
  return any != 0;
}

template <class T>
POLYSPEC_LOOP void key_loop(const T* data, int64_t n, uint32_t* keys) {
  for (int64_t i = 0; i < n; ++i) keys[i] = key_of(to_float(data[i]));
}

// ---- Masked rows: blocks of one are copied with -inf for forbidden ids ----

constexpr int64_t kMaskedBlock = 1024;

template <class T>
POLYSPEC_LOOP void masked_loop(const Row<Masked<T>>& given, int64_t begin, int64_t n, T* logits) {
  const Row<Masked<T>> row = given;
  const T lowest = lowest_logit<T>();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint32_t bits = row.template bits_at<32>(begin + i);
    const T* from = row.data + begin + i;
    for (int j = 0; j < 32; ++j) logits[i + j] = (bits >> j & 1) != 0 ? from[j] : lowest;
  }
  for (; i < n; ++i)
    logits[i] = (row.template bits_at<1>(begin + i) & 1) != 0 ? row.data[begin + i] : lowest;
}

// n logits of a row from `begin` on; `block` has room for them where the row is masked.
template <class T>
POLYSPEC_FN const Plain<T>* span_of(const Row<T>& row, int64_t begin, int64_t n, Plain<T>* block) {
  if constexpr (kIsMasked<T>) {
    masked_loop(row, begin, n, block);
    return block;
  } else {
    return row.data + begin;
  }
}
template <class T>
constexpr int64_t room_for_span(int64_t n) {
  return kIsMasked<T> ? n : 1;
}

// f(block, n) for the blocks of [begin, end).
template <class T, class F>
POLYSPEC_FN void over_blocks(const Row<Masked<T>>& row, int64_t begin, int64_t end, const F& f) {
  T block[kMaskedBlock];
  for (int64_t at = begin; at < end; at += kMaskedBlock) {
    const int64_t n = end - at < kMaskedBlock ? end - at : kMaskedBlock;
    masked_loop(row, at, n, block);
    f(block, n);
  }
}

// ---- Rows and weights with an element type known at run time: dispatch once per range ----

// f(row) with the element type as a template argument.
template <class T, class F>
POLYSPEC_FN auto with_type(const Row<T>& row, const F& f) {
  return f(row);
}
template <class F>
POLYSPEC_FN auto with_type(const AnyRow& row, const F& f) {
  switch (row.data.dtype) {
    case DType::kFloat32:
      return f(as_row<float>(row));
    case DType::kBFloat16:
      return f(as_row<BFloat16>(row));
    default:
      return f(as_row<Float16>(row));
  }
}
template <class F>
POLYSPEC_FN auto with_type(const Row<Any>& row, const F& f) {
  return with_type(AnyRow{row.data, row.n}, f);
}
template <class F>
POLYSPEC_FN auto with_type(const Row<Masked<Any>>& row, const F& f) {
  return with_type(AnyRow{row.data, row.n}, [&](const auto& typed) {
    using T = typename std::decay_t<decltype(typed)>::Element;
    return f(Row<Masked<T>>{typed.data, row.allowed, row.first, row.n});
  });
}

// The same distribution's masses over another view of the row.
template <class From, class To>
POLYSPEC_FN TokenMass<To> over(const TokenMass<From>& weight, const To& row) {
  return {row, weight.max, weight.threshold, weight.slope, weight.head};
}

// weight(begin) + ... + weight(end - 1), here and for other weights below.
template <class T>
POLYSPEC_FN uint64_t typed_mass(const TokenMass<Row<T>>& weight, int64_t begin, int64_t end) {
  if (!fits_vectors(weight.head)) return sum_loop(weight, begin, end);
  return with_cut(weight, [&](const auto& masses) { return sum_loop(masses, begin, end); });
}
template <class T>
uint64_t typed_mass(const TokenMass<Row<Masked<T>>>& weight, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  over_blocks(weight.row, begin, end, [&](const T* block, int64_t n) {
    sum += typed_mass(over(weight, Row<T>{block, n}), 0, n);
  });
  return sum;
}
template <class RowType>
POLYSPEC_FN uint64_t mass_between(const TokenMass<RowType>& weight, int64_t begin, int64_t end) {
  return with_type(weight.row,
                   [&](const auto& row) { return typed_mass(over(weight, row), begin, end); });
}

template <class T>
POLYSPEC_FN void masses_of(const TokenMass<Row<T>>& weight, int64_t begin, int64_t n,
                           uint64_t* masses) {
  if (!fits_vectors(weight.head)) return mass_loop(weight, begin, n, masses);
  with_cut(weight, [&](const auto& real) { mass_loop(real, begin, n, masses); });
}

template <class T>
POLYSPEC_FN Extremes typed_extremes(const Row<T>& row, int64_t begin, int64_t end) {
  return extremes_loop(row.data + begin, end - begin);
}
template <class T>
Extremes typed_extremes(const Row<Masked<T>>& row, int64_t begin, int64_t end) {
  Extremes all{kOrderMinusInfinity, kOrderInfinity};
  over_blocks(row, begin, end, [&](const T* block, int64_t n) {
    const Extremes found = extremes_loop(block, n);
    all.high = found.high > all.high ? found.high : all.high;
    all.low = found.low < all.low ? found.low : all.low;
  });
  return all;
}

}  // namespace polyspec::POLYSPEC_CORE
