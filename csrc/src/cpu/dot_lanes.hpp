// Sixteen outputs side by side with packed whole numbers as weights: the primitives of one
// instruction set for the loops of int4_product.cpp and block_product.cpp.
//
//   Dots          16 sums of products of integers, exact;
//   add_chunk     dots[n][m] += the products of kInputs inputs of tile n with token m's;
//   bias_of       the difference of the weight that add_chunk multiplies and the packed weight.
//
// Packed weights have 4, 6 or 8 bits (polyspec/blocks.hpp). A step is four inputs of all outputs,
// and becomes a vector of 64 bytes. One load of an activation serves all tiles at once, and several
// keep enough sums in flight.
#pragma once

#include "cpu/convert.hpp"
#include "cpu/lanes.hpp"
#include "cpu/prefetch.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kStepInputs = 4;
constexpr int64_t kVectorBytes = 64;

// Where a step's weights begin: the vector with their 4 low bits, or with all 8.
template <int kBits>
constexpr int64_t vector_of(int64_t step) {
  if (kBits == 4) return step / 2 * kVectorBytes;
  if (kBits == 8) return step * kVectorBytes;
  return (step / 4 * 3 + 1 + step % 4 / 2) * kVectorBytes;
}
// The same of the 2 high bits of 6: the next step's lie above them.
constexpr int64_t high_of(int64_t step) { return step / 4 * 3 * kVectorBytes; }

// Whether the step is the first to read its vector.
template <int kBits>
constexpr bool begins_vector(int64_t step) {
  return kBits == 8 || step % 2 == 0;
}

// A step of a token.
POLYSPEC_FN int32_t four_of(const int8_t* x, int64_t step) {
  int32_t four;
  memcpy(&four, x + kStepInputs * step, sizeof(four));
  return four;
}

template <int kBits>
POLYSPEC_FN void prefetch_step(const uint8_t* weights, int64_t step, int64_t run_bytes) {
  if (begins_vector<kBits>(step)) prefetch(weights + vector_of<kBits>(step), run_bytes);
  if (kBits == 6 && step % 4 == 0) prefetch(weights + high_of(step), run_bytes);
}

#if defined(__AVX512VNNI__)

using Dots = __m512i;
using Weights = __m512i;

template <int kBits>
constexpr int32_t bias_of() {
  return 0;
}
POLYSPEC_FN Dots dots_from(int32_t value) { return _mm512_set1_epi32(value); }
POLYSPEC_FN Sums to_sums(Dots dots) { return _mm512_cvtepi32_ps(dots); }

// Whole numbers without a sign.
template <int kBits>
POLYSPEC_FN Weights step_weights(const uint8_t* weights, int64_t step) {
  const __m512i some = _mm512_load_si512(weights + vector_of<kBits>(step));
  if constexpr (kBits == 8) return some;
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i low = _mm512_and_si512(step % 2 == 0 ? some : _mm512_srli_epi16(some, 4), mask);
  if constexpr (kBits == 4) return low;
  const __m512i all = _mm512_load_si512(weights + high_of(step));
  const __m512i high = step % 4 == 0   ? _mm512_slli_epi16(all, 4)
                       : step % 4 == 1 ? _mm512_slli_epi16(all, 2)
                       : step % 4 == 2 ? all
                                       : _mm512_srli_epi16(all, 2);
  return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
}

POLYSPEC_FN Dots add_step(Dots dots, Weights weights, int32_t four) {
  return _mm512_dpbusd_epi32(dots, weights, _mm512_set1_epi32(four));
}

#elif defined(__AVX2__)

struct Dots {
  __m256i low, high;
};

POLYSPEC_FN Dots dots_from(int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}
POLYSPEC_FN Sums to_sums(Dots dots) {
  return {_mm256_cvtepi32_ps(dots.low), _mm256_cvtepi32_ps(dots.high)};
}

// Half of a step, whole numbers without a sign: 8 outputs, from output 8 * half on.
template <int kBits>
POLYSPEC_FN __m256i half_weights(const uint8_t* weights, int64_t step, int half) {
  const auto load_at = [&](int64_t at) POLYSPEC_INLINE {
    return _mm256_load_si256(
        reinterpret_cast<const __m256i*>(weights + at + half * kVectorBytes / 2));
  };
  const __m256i some = load_at(vector_of<kBits>(step));
  if constexpr (kBits == 8) return some;
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i low = _mm256_and_si256(step % 2 == 0 ? some : _mm256_srli_epi16(some, 4), mask);
  if constexpr (kBits == 4) return low;
  const __m256i all = load_at(high_of(step));
  const __m256i high = step % 4 == 0   ? _mm256_slli_epi16(all, 4)
                       : step % 4 == 1 ? _mm256_slli_epi16(all, 2)
                       : step % 4 == 2 ? all
                                       : _mm256_srli_epi16(all, 2);
  return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
}

#if defined(__AVXVNNI__)

struct Weights {
  __m256i low, high;
};

template <int kBits>
constexpr int32_t bias_of() {
  return 0;
}
template <int kBits>
POLYSPEC_FN Weights step_weights(const uint8_t* weights, int64_t step) {
  return {half_weights<kBits>(weights, step, 0), half_weights<kBits>(weights, step, 1)};
}
POLYSPEC_FN Dots add_step(Dots dots, Weights weights, int32_t four) {
  const __m256i all = _mm256_set1_epi32(four);
  return {_mm256_dpbusd_avx_epi32(dots.low, weights.low, all),
          _mm256_dpbusd_avx_epi32(dots.high, weights.high, all)};
}

#else

// With 8 bits it multiplies q - 128, which has a sign.
template <int kBits>
constexpr int32_t bias_of() {
  return kBits == 8 ? -128 : 0;
}

// Sums of two products, 16 bits each.
template <int kBits>
POLYSPEC_FN __m256i two_products(__m256i weights, __m256i four) {
  if constexpr (kBits == 8) {
    const __m256i some = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(some), _mm256_sign_epi8(four, some));
  }
  return _mm256_maddubs_epi16(weights, four);
}
// How many of them fit 16 bits: of 2 * 15 * 127, 2 * 63 * 127 and 2 * 128 * 127.
template <int kBits>
constexpr int fitting() {
  return kBits == 4 ? 8 : kBits == 6 ? 2 : 1;
}

template <int kBits, int kInputs, int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* weights, int64_t tile_bytes,
                           const int8_t* x) {
  constexpr int kSteps = kInputs / kStepInputs;
  constexpr int kFit = fitting<kBits>() < kSteps ? fitting<kBits>() : kSteps;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i low[N][M], high[N][M];
  unrolled<kSteps>([&](auto step) POLYSPEC_INLINE {
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      const uint8_t* from = weights + n * tile_bytes;
      prefetch_step<kBits>(from, step, N * tile_bytes);
      const __m256i first = half_weights<kBits>(from, step, 0);
      const __m256i second = half_weights<kBits>(from, step, 1);
      unrolled<M>([&](auto m) POLYSPEC_INLINE {
        const __m256i four = _mm256_set1_epi32(four_of(x + m * kInputs, step));
        const auto add = [&](__m256i& sum, __m256i some, __m256i& dot) POLYSPEC_INLINE {
          const __m256i products = two_products<kBits>(some, four);
          sum = step % kFit == 0 ? products : _mm256_add_epi16(sum, products);
          // Else GCC would add up products first, and have no registers for so many.
          asm("" : "+x"(sum));
          if (step % kFit == kFit - 1) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(sum, ones));
        };
        add(low[n][m], first, dots[n][m].low);
        add(high[n][m], second, dots[n][m].high);
      });
    });
  });
}

#endif

#elif defined(__ARM_FEATURE_DOTPROD)

struct Dots {
  int32x4_t quarters[4];
};
struct Weights {
  int8x16_t quarters[4];
};

// Weights have a sign here: with 8 bits it multiplies q - 128.
template <int kBits>
constexpr int32_t bias_of() {
  return kBits == 8 ? -128 : 0;
}
POLYSPEC_FN Dots dots_from(int32_t value) {
  const int32x4_t quarter = vdupq_n_s32(value);
  return {quarter, quarter, quarter, quarter};
}
POLYSPEC_FN Sums to_sums(const Dots& dots) {
  return by_quarters([&](int i) POLYSPEC_INLINE { return vcvtq_f32_s32(dots.quarters[i]); });
}

template <int kBits>
POLYSPEC_FN uint8x16_t quarter_weights(const uint8_t* weights, int64_t step) {
  const uint8x16_t some = vld1q_u8(weights + vector_of<kBits>(step));
  if constexpr (kBits == 8) return veorq_u8(some, vdupq_n_u8(128));
  const uint8x16_t low = step % 2 == 0 ? vandq_u8(some, vdupq_n_u8(15)) : vshrq_n_u8(some, 4);
  if constexpr (kBits == 4) return low;
  const uint8x16_t all = vld1q_u8(weights + high_of(step));
  const uint8x16_t high = step % 4 == 0   ? vshlq_n_u8(all, 4)
                          : step % 4 == 1 ? vshlq_n_u8(all, 2)
                          : step % 4 == 2 ? all
                                          : vshrq_n_u8(all, 2);
  return vorrq_u8(low, vandq_u8(high, vdupq_n_u8(0x30)));
}
template <int kBits>
POLYSPEC_FN Weights step_weights(const uint8_t* weights, int64_t step) {
  Weights made;
  unrolled<4>([&](auto i) POLYSPEC_INLINE {
    made.quarters[i] = vreinterpretq_s8_u8(quarter_weights<kBits>(weights + 16 * i, step));
  });
  return made;
}
POLYSPEC_FN Dots add_step(Dots dots, const Weights& weights, int32_t four) {
  const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
  unrolled<4>([&](auto i) POLYSPEC_INLINE {
    dots.quarters[i] = vdotq_s32(dots.quarters[i], weights.quarters[i], all);
  });
  return dots;
}

#else

struct Dots {
  int32_t lanes[kLanes];
};

template <int kBits>
constexpr int32_t bias_of() {
  return 0;
}
POLYSPEC_FN Dots dots_from(int32_t value) {
  Dots made;
  for (int32_t& lane : made.lanes) lane = value;
  return made;
}
POLYSPEC_FN Sums to_sums(const Dots& dots) {
  float made[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) made[i] = static_cast<float>(dots.lanes[i]);
  return load(made);
}

// `byte`: 4 * output + input.
template <int kBits>
POLYSPEC_FN int32_t step_weight(const uint8_t* weights, int64_t step, int64_t byte) {
  const int32_t some = weights[vector_of<kBits>(step) + byte];
  if (kBits == 8) return some;
  const int32_t low = some >> step % 2 * 4 & 15;
  if (kBits == 4) return low;
  return low | (weights[high_of(step) + byte] >> step % 4 * 2 & 3) << 4;
}

template <int kBits, int kInputs, int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* weights, int64_t tile_bytes,
                           const int8_t* x) {
  for (int64_t step = 0; step < kInputs / kStepInputs; ++step) {
    for (int m = 0; m < M; ++m) {
      const int8_t* four = x + m * kInputs + kStepInputs * step;
      for (int n = 0; n < N; ++n) {
        for (int64_t i = 0; i < kLanes; ++i) {
          int32_t sum = 0;
          for (int64_t j = 0; j < kStepInputs; ++j)
            sum += step_weight<kBits>(weights + n * tile_bytes, step, 4 * i + j) * four[j];
          dots[n][m].lanes[i] += sum;
        }
      }
    }
  }
}

#endif

// One instruction adds up the four products of a step.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
template <int kBits, int kInputs, int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* weights, int64_t tile_bytes,
                           const int8_t* x) {
  // Unrolled by the compiler: eight copies of all that is inlined here would take it twice as long.
#pragma GCC unroll 8
  for (int64_t step = 0; step < kInputs / kStepInputs; ++step) {
    Weights some[N];
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      const uint8_t* from = weights + n * tile_bytes;
      prefetch_step<kBits>(from, step, N * tile_bytes);
      some[n] = step_weights<kBits>(from, step);
    });
    unrolled<M>([&](auto m) POLYSPEC_INLINE {
      const int32_t four = four_of(x + m * kInputs, step);
      unrolled<N>([&](auto n)
                      POLYSPEC_INLINE { dots[n][m] = add_step(dots[n][m], some[n], four); });
    });
  }
}
#endif

// 16 scales converted to Sums.
POLYSPEC_FN Sums load_sixteen(const uint8_t* from, DType dtype) {
  return dtype == DType::kFloat32 ? load(reinterpret_cast<const float*>(from))
                                  : load(reinterpret_cast<const BFloat16*>(from));
}

// The sums of a tile, of `outputs` that a matrix has, into a token's row of y.
template <class T>
POLYSPEC_FN void write_tile(const Sums& sums, int64_t tile, int64_t outputs, T* row) {
  float values[kLanes];
  store(values, sums);
  const int64_t begin = tile * kLanes, rest = outputs - begin;
  write_outputs(values, rest < kLanes ? rest : kLanes, row + begin);
}
POLYSPEC_FN void write_tile(const Sums& sums, int64_t tile, int64_t outputs, DType dtype, void* y,
                            int64_t at) {
  switch (dtype) {
    case DType::kFloat32:
      return write_tile(sums, tile, outputs, static_cast<float*>(y) + at);
    case DType::kBFloat16:
      return write_tile(sums, tile, outputs, static_cast<BFloat16*>(y) + at);
    case DType::kFloat16:
      return write_tile(sums, tile, outputs, static_cast<Float16*>(y) + at);
  }
}

}  // namespace polyspec::POLYSPEC_CORE
