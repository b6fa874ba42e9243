// Portable arithmetic of the row algorithms. Every function gives the same bits on every processor:
// IEEE operations in a fixed order, fused only where fma is written (the build turns contraction
// off).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "core/macros.hpp"
#include "polyspec/types.hpp"

// (The macros are GCC's and Clang's; -Ofast and -ffinite-math-only set them as well.)
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#error "polyspec: not with -ffast-math or a part of it: distributions are exact by IEEE arithmetic"
#endif

namespace polyspec::POLYSPEC_CORE {

template <class To, class From>
POLYSPEC_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Signed integers in the order of the floats: negative NaNs, -inf, ..., -0, +0, ..., +inf, NaNs.
// Integer maxima vectorise without relaxing float semantics, and NaNs show at the ends.
POLYSPEC_FN int32_t order_of(float value) {
  const int32_t bits = bit_cast<int32_t>(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
POLYSPEC_FN float value_of(int32_t order) {
  return bit_cast<float>(order ^ ((order >> 31) & 0x7fffffff));
}
constexpr int32_t kOrderInfinity = 0x7f800000;
constexpr int32_t kOrderMinusInfinity = static_cast<int32_t>(0x807fffffu);
constexpr int32_t kOrderNan = 0x7fffffff;  // above all

// Unsigned keys in the order of the floats, -0 and +0 equal, for the radix select.
POLYSPEC_FN uint32_t key_of(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
POLYSPEC_FN float value_of_key(uint32_t key) {
  return value_of(static_cast<int32_t>(key ^ 0x80000000u));
}

// Head room of the integer masses: V tokens of at most 2^(62 - head_room(V)) add up to less than
// 2^63.
POLYSPEC_FN int head_room(int64_t vocab) {
  int bits = 0;
  while ((int64_t{1} << bits) < vocab) ++bits;
  return bits;
}
POLYSPEC_FN double mass_unit(int head) { return static_cast<double>(uint64_t{1} << (62 - head)); }

// 2^f on [-1/2, 1/2] times 2^n, n the low bits of `shifted`, and `unit`, a power of two of at least
// 1, which changes no other bit: a polynomial fitted for relative error (2e-9 before rounding, 8e-8
// after).
POLYSPEC_FN float exp2_of_parts(float f, float shifted, float unit) {
  float p = 0.00015353362f * unit;
  p = __builtin_fmaf(p, f, 0.0013398874f * unit);
  p = __builtin_fmaf(p, f, 0.009618437f * unit);
  p = __builtin_fmaf(p, f, 0.055503324f * unit);
  p = __builtin_fmaf(p, f, 0.24022648f * unit);
  p = __builtin_fmaf(p, f, 0.6931472f * unit);
  p = __builtin_fmaf(p, f, unit);
  return bit_cast<float>(bit_cast<uint32_t>(p) + (bit_cast<uint32_t>(shifted) << 23));
}

// 1.5 * 2^23: added to a float it rounds to an integer, which the low bits of the sum then are.
constexpr float kShifter = 12582912.0f;

// 2^exponent on [-127, 0] times `unit`, and 0 at -127 times 1; of a NaN the bits are any.
POLYSPEC_FN float exp2_in_range(float exponent, float unit = 1.0f) {
  const float shifted = exponent + kShifter;
  return exp2_of_parts(exponent - (shifted - kShifter), shifted, unit);
}

// 2^(-64 part) times `unit`, at least 2^3: the same bits as of a product that gave the exponent.
POLYSPEC_FN float exp2_of_64ths(float part, float unit) {
  const float shifted = __builtin_fmaf(part, -64.0f, kShifter);
  return exp2_of_parts(__builtin_fmaf(part, -64.0f, kShifter - shifted), shifted, unit);
}

// 2^exponent times `unit`, exponent <= 0 (-inf and NaN give 2^-100, below every unit of mass).
POLYSPEC_FN float exp2_of(float exponent, float unit = 1.0f) {
  return exp2_in_range(exponent > -100.0f ? exponent : -100.0f, unit);
}

// trunc(2^(62 - head) * 2^exponent), exponent <= 0: the float's 24 significant bits are shifted as
// an integer. (Some devices convert instead, see TokenMass.)
POLYSPEC_FN uint64_t mass_of_exponent(float exponent, int head) {
  const uint32_t bits = bit_cast<uint32_t>(exp2_of(exponent));
  const uint32_t down = 127u - (bits >> 23) + static_cast<uint32_t>(head);
  const uint64_t significand = static_cast<uint64_t>((bits & 0x7fffffu) | 0x800000u) << 39;
  return significand >> (down < 63u ? down : 63u);
}

// Temperatures above 0 (sample.hpp): below the least the slope would overflow; above the most
// differences of logits that overflow would still have mass.
constexpr float kLeastTemperature = 0x1p-126f;
constexpr float kMostTemperature = 0x1p120f;

// log2(e) / T as the float that scales logits.
POLYSPEC_FN float slope_of(float temperature) {
  return static_cast<float>(1.4426950408889634 / static_cast<double>(temperature));
}

// Natural logarithm of a positive normal double, within 2 ulp: the C libraries' differ in the last
// bit.
POLYSPEC_CALLED double portable_log(double value) {
  uint64_t bits = bit_cast<uint64_t>(value);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
  double m = bit_cast<double>(bits);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1;
  }
  const double s = (m - 1.0) / (m + 1.0);  // log m = 2 (s + s^3/3 + s^5/5 + ...), |s| < 0.172
  const double s2 = s * s;
  double sum = 0.0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return 2.0 * s * sum + exponent * 0.6931471805599453;
}

// High 64 bits of a product: maps uniform bits to an integer in [0, range).
POLYSPEC_FN uint64_t mul_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

}  // namespace polyspec::POLYSPEC_CORE
