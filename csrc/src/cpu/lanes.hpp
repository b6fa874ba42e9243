// Sixteen float32 in the registers of one instruction set: the sums of a tile's outputs.
#pragma once

#include <type_traits>

#include "core/row.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define POLYSPEC_INLINE __attribute__((always_inline))

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kLanes = 16;

// body(0), body(1), ... with constants: arrays indexed only by constants stay in registers.
template <int kCount, class Body>
POLYSPEC_FN void unrolled(const Body& body) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(body);
    body(std::integral_constant<int, kCount - 1>());
  }
}

#if defined(__AVX512F__)

using Sums = __m512;

POLYSPEC_FN Sums no_sums() { return _mm512_setzero_ps(); }
POLYSPEC_FN Sums times(Sums a, Sums b) { return _mm512_mul_ps(a, b); }
POLYSPEC_FN Sums times(Sums a, float b) { return times(a, _mm512_set1_ps(b)); }
POLYSPEC_FN Sums fused(Sums a, Sums b, Sums c) { return _mm512_fmadd_ps(a, b, c); }
POLYSPEC_FN Sums fused(Sums a, float b, Sums c) { return fused(a, _mm512_set1_ps(b), c); }
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

POLYSPEC_FN Sums no_sums() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
POLYSPEC_FN Sums times(Sums a, Sums b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
POLYSPEC_FN Sums times(Sums a, float b) {
  const __m256 all = _mm256_set1_ps(b);
  return times(a, Sums{all, all});
}
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

#elif defined(__aarch64__)

struct Sums {
  float32x4_t quarters[4];
};

// Four quarters by their numbers, which are constants once inlined.
template <class Of>
POLYSPEC_FN Sums by_quarters(const Of& of) {
  return {of(0), of(1), of(2), of(3)};
}
POLYSPEC_FN Sums no_sums() {
  return by_quarters([](int) POLYSPEC_INLINE { return vdupq_n_f32(0); });
}
POLYSPEC_FN Sums times(const Sums& a, const Sums& b) {
  return by_quarters([&](int i)
                         POLYSPEC_INLINE { return vmulq_f32(a.quarters[i], b.quarters[i]); });
}
POLYSPEC_FN Sums times(const Sums& a, float b) {
  return by_quarters([&](int i) POLYSPEC_INLINE { return vmulq_n_f32(a.quarters[i], b); });
}
POLYSPEC_FN Sums fused(const Sums& a, const Sums& b, const Sums& c) {
  return by_quarters([&](int i) POLYSPEC_INLINE {
    return vfmaq_f32(c.quarters[i], a.quarters[i], b.quarters[i]);
  });
}
POLYSPEC_FN Sums fused(const Sums& a, float b, const Sums& c) {
  return by_quarters([&](int i)
                         POLYSPEC_INLINE { return vfmaq_n_f32(c.quarters[i], a.quarters[i], b); });
}
POLYSPEC_FN Sums load(const float* from) {
  return by_quarters([&](int i) POLYSPEC_INLINE { return vld1q_f32(from + 4 * i); });
}
POLYSPEC_FN Sums load(const BFloat16* from) {
  return by_quarters([&](int i) POLYSPEC_INLINE {
    const uint16x4_t half = vld1_u16(&from[4 * i].bits);
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
  });
}
POLYSPEC_FN void store(float* to, const Sums& sums) {
  unrolled<4>([&](auto i) POLYSPEC_INLINE { vst1q_f32(to + 4 * i, sums.quarters[i]); });
}

#else

struct Sums {
  float lanes[kLanes];
};

POLYSPEC_FN Sums no_sums() { return {}; }
POLYSPEC_FN Sums times(Sums a, const Sums& b) {
  for (int64_t i = 0; i < kLanes; ++i) a.lanes[i] *= b.lanes[i];
  return a;
}
POLYSPEC_FN Sums times(Sums a, float b) {
  for (float& lane : a.lanes) lane *= b;
  return a;
}
POLYSPEC_FN Sums fused(const Sums& a, const Sums& b, Sums c) {
  for (int64_t i = 0; i < kLanes; ++i)
    c.lanes[i] = __builtin_fmaf(a.lanes[i], b.lanes[i], c.lanes[i]);
  return c;
}
POLYSPEC_FN Sums fused(const Sums& a, float b, Sums c) {
  for (int64_t i = 0; i < kLanes; ++i) c.lanes[i] = __builtin_fmaf(a.lanes[i], b, c.lanes[i]);
  return c;
}
template <class T>
POLYSPEC_FN Sums load(const T* from) {
  Sums made;
  for (int64_t i = 0; i < kLanes; ++i) made.lanes[i] = to_float(from[i]);
  return made;
}
POLYSPEC_FN void store(float* to, const Sums& sums) { memcpy(to, sums.lanes, sizeof(sums.lanes)); }

#endif

}  // namespace polyspec::POLYSPEC_CORE
