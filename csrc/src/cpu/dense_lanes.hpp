// Sixteen outputs side by side: the primitives of one instruction set for the loops of
// dense_product.cpp.
//
//   kMostTokens      how many tokens share a load of weights;
//   tiles_at_once    the most tiles with sums for so many tokens in the registers;
//   kSteps<T>        a block's inputs are multiplied in so many steps, the later inputs first;
//   step_weights<T>  the weights of 16 outputs in one step, which is a constant;
//   step_word<T>     4 bytes of a token's activations in a block, for one step;
//   add_step<T>      s plus the products of a step's weights and a word.
#pragma once

#include "cpu/dense_layout.hpp"
#include "cpu/lanes.hpp"

namespace polyspec::POLYSPEC_CORE {

#if defined(__AVX512F__)
// As many registers as sums, in addition to weights and activations.
constexpr int kMostTokens = 14;
constexpr int tiles_at_once(int tokens) { return 30 / (tokens + 1) < 4 ? 30 / (tokens + 1) : 4; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kMostTokens = 5;
constexpr int tiles_at_once(int tokens) { return tokens < 4 ? 4 - tokens : 1; }
#else
constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int) { return 1; }
#endif

#if defined(__AVX512BF16__)

template <class T>
constexpr int kSteps = 1;

template <class T>
POLYSPEC_FN Sums step_weights(const uint8_t* from, int) {
  return load(reinterpret_cast<const float*>(from));
}
template <class T>
POLYSPEC_FN int32_t step_word(int32_t inputs, int) {
  return inputs;
}
template <class T>
POLYSPEC_FN Sums add_step(Sums weights, int32_t word, Sums sums) {
  if constexpr (sizeof(T) == 4) return fused(weights, bit_cast<float>(word), sums);
  // The instruction rounds each of its two multiply-adds, and treats numbers below 2^-126 as zero.
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(word));
}

#else

// One input each, as float32.
template <class T>
constexpr int kSteps = 4 / sizeof(T);

// Of words that hold one input or, the earlier one in the low half, two.
template <class T>
POLYSPEC_FN int32_t step_word(int32_t inputs, int step) {
  if constexpr (sizeof(T) == 4) return inputs;
  return step == 0 ? inputs & -65536 : static_cast<int32_t>(static_cast<uint32_t>(inputs) << 16);
}
#if defined(__AVX512F__)
template <class T>
POLYSPEC_FN Sums step_weights(const uint8_t* from, int step) {
  const __m512i inputs = _mm512_load_si512(from);
  if constexpr (sizeof(T) == 4) return _mm512_castsi512_ps(inputs);
  return _mm512_castsi512_ps(step == 0 ? _mm512_and_si512(inputs, _mm512_set1_epi32(-65536))
                                       : _mm512_slli_epi32(inputs, 16));
}
#elif defined(__AVX2__)
template <class T>
POLYSPEC_FN __m256 half_weights(const uint8_t* from, int step) {
  const __m256i inputs = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (sizeof(T) == 4) return _mm256_castsi256_ps(inputs);
  return _mm256_castsi256_ps(step == 0 ? _mm256_and_si256(inputs, _mm256_set1_epi32(-65536))
                                       : _mm256_slli_epi32(inputs, 16));
}
template <class T>
POLYSPEC_FN Sums step_weights(const uint8_t* from, int step) {
  return {half_weights<T>(from, step), half_weights<T>(from + kBlockBytes / 2, step)};
}
#elif defined(__aarch64__)
template <class T>
POLYSPEC_FN Sums step_weights(const uint8_t* from, int step) {
  return by_quarters([&](int i) POLYSPEC_INLINE {
    const uint32x4_t inputs = vreinterpretq_u32_u8(vld1q_u8(from + 16 * i));
    if constexpr (sizeof(T) == 4) return vreinterpretq_f32_u32(inputs);
    return vreinterpretq_f32_u32(step == 0 ? vandq_u32(inputs, vdupq_n_u32(0xffff0000u))
                                           : vshlq_n_u32(inputs, 16));
  });
}
#else
template <class T>
POLYSPEC_FN Sums step_weights(const uint8_t* from, int step) {
  int32_t inputs[kLanes];
  memcpy(inputs, from, sizeof(inputs));
  Sums made;
  for (int64_t i = 0; i < kLanes; ++i)
    made.lanes[i] = bit_cast<float>(step_word<T>(inputs[i], step));
  return made;
}
#endif
template <class T>
POLYSPEC_FN Sums add_step(const Sums& weights, int32_t word, const Sums& sums) {
  return fused(weights, bit_cast<float>(word), sums);
}

#endif

}  // namespace polyspec::POLYSPEC_CORE
