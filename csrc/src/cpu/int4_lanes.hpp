// Sixteen outputs side by side: what one instruction set has for the loops of int4_product.cpp.
//
//   Input       what an activation is prepared as;
//   kStep       activations of one multiplication;
//   Weights     the weights of 16 outputs at kStep inputs, unpacked;
//   Sums        16 float32 sums;
//   kSums       how many of those fit into the registers beside what a multiplication needs.
#pragma once

#include "core/row.hpp"
#include "cpu/int4_layout.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polyspec::POLYSPEC_CORE {

#if defined(__AVX512F__)

using Sums = __m512;
constexpr int kSums = 24;

POLYSPEC_FN Sums no_sums() { return _mm512_setzero_ps(); }
POLYSPEC_FN Sums fused(Sums a, Sums b, Sums c) { return _mm512_fmadd_ps(a, b, c); }
POLYSPEC_FN Sums fused(Sums a, float b, Sums c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
POLYSPEC_FN Sums load(const float* from) { return _mm512_loadu_ps(from); }
POLYSPEC_FN Sums load(const BFloat16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
POLYSPEC_FN void store(float* to, Sums sums) { _mm512_storeu_ps(to, sums); }

#elif defined(__AVX2__)

struct Sums {
  __m256 low, high;
};
constexpr int kSums = 6;

POLYSPEC_FN Sums no_sums() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
POLYSPEC_FN Sums fused(Sums a, Sums b, Sums c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
POLYSPEC_FN Sums fused(Sums a, float b, Sums c) {
  const __m256 all = _mm256_set1_ps(b);
  return fused(a, Sums{all, all}, c);
}
POLYSPEC_FN Sums load(const float* from) {
  return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
POLYSPEC_FN __m256 widened(const BFloat16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
POLYSPEC_FN Sums load(const BFloat16* from) { return {widened(from), widened(from + 8)}; }
POLYSPEC_FN void store(float* to, Sums sums) {
  _mm256_storeu_ps(to, sums.low);
  _mm256_storeu_ps(to + 8, sums.high);
}

#else

struct Sums {
  float lanes[kInt4Outputs];
};
constexpr int kSums = 2;

POLYSPEC_FN Sums no_sums() { return {}; }
POLYSPEC_FN Sums fused(const Sums& a, const Sums& b, Sums c) {
  for (int64_t i = 0; i < kInt4Outputs; ++i) c.lanes[i] += a.lanes[i] * b.lanes[i];
  return c;
}
POLYSPEC_FN Sums fused(const Sums& a, float b, Sums c) {
  for (int64_t i = 0; i < kInt4Outputs; ++i) c.lanes[i] += a.lanes[i] * b;
  return c;
}
template <class T>
POLYSPEC_FN Sums load(const T* from) {
  Sums made;
  for (int64_t i = 0; i < kInt4Outputs; ++i) made.lanes[i] = to_float(from[i]);
  return made;
}
POLYSPEC_FN void store(float* to, const Sums& sums) { memcpy(to, sums.lanes, sizeof(sums.lanes)); }

#endif

#if defined(__AVX512BF16__)

using Input = BFloat16;
constexpr int64_t kStep = 2;
constexpr bool kRoundsActivations = true;
using Weights = __m512i;

// A word's nibble selects among 32 entries by five bits; both halves hold the same, so that what
// stands beside the nibble does not matter.
POLYSPEC_FN __m512i values() {
  alignas(64) static constexpr uint16_t kValues[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,  // -8 ... -1
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,  // 0 ... 7
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return _mm512_load_si512(kValues);
}
template <int kPlace>
POLYSPEC_FN Weights unpacked(const uint8_t* block) {
  const __m512i words = _mm512_load_si512(block);
  return _mm512_permutexvar_epi16(kPlace == 0 ? words : _mm512_srli_epi16(words, 4 * kPlace),
                                  values());
}
template <int kPlace>
POLYSPEC_FN Sums multiplied(Sums sums, Weights weights, const Input* block) {
  int32_t pair;
  memcpy(&pair, block + 2 * kPlace, sizeof(pair));
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(weights),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

#else

using Input = float;
constexpr int64_t kStep = 1;
constexpr bool kRoundsActivations = false;
using Weights = Sums;

#if defined(__AVX512F__)
template <int kPlace>
POLYSPEC_FN Weights unpacked(const uint8_t* block) {
  const __m512i words = _mm512_load_si512(block);
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * kPlace), values);
}
#elif defined(__AVX2__)
template <int kPlace>
POLYSPEC_FN Weights unpacked(const uint8_t* block) {
  const auto half = [&](int64_t at) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(block + at));
    const __m256i nibbles =
        _mm256_and_si256(_mm256_srli_epi32(words, 4 * kPlace), _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
  };
  return {half(0), half(32)};
}
#else
template <int kPlace>
POLYSPEC_FN Weights unpacked(const uint8_t* block) {
  Weights made;
  for (int64_t i = 0; i < kInt4Outputs; ++i) {
    uint32_t word;
    memcpy(&word, block + 4 * i, sizeof(word));
    made.lanes[i] = static_cast<float>(static_cast<int32_t>(word >> (4 * kPlace) & 15u) - 8);
  }
  return made;
}
#endif
template <int kPlace>
POLYSPEC_FN Sums multiplied(Sums sums, const Weights& weights, const Input* block) {
  return fused(weights, block[input_of(kPlace)], sums);
}

#endif

}  // namespace polyspec::POLYSPEC_CORE
