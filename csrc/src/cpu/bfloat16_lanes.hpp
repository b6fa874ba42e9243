// Sixteen outputs side by side: what one instruction set has for the loops of bfloat16_product.cpp.
//
//   kMostTokens     how many tokens share a load of weights;
//   tiles_at_once   the most whose sums with so many tokens fit the registers;
//   Weights         a block: two inputs of 16 outputs;
//   fused(w, x, s)  s plus the products of both inputs, the second one first.
//
// Several tiles are as many streams from memory, which the processor's own prefetching keeps busy;
// asking for what lies ahead slows them.
#pragma once

#include "cpu/bfloat16_layout.hpp"
#include "cpu/lanes.hpp"

namespace polyspec::POLYSPEC_CORE {

#if defined(__AVX512BF16__)

// As many registers as sums, beside weights and activations.
constexpr int kMostTokens = 14;
constexpr int tiles_at_once(int tokens) { return 30 / (tokens + 1) < 8 ? 30 / (tokens + 1) : 8; }

using Weights = __m512bh;
POLYSPEC_FN Weights load_weights(const uint8_t* from) { return (__m512bh)_mm512_load_si512(from); }
// The instruction rounds each of its two multiply-adds, and takes what is below 2^-126 for zero.
POLYSPEC_FN Sums fused(Weights weights, int32_t x, Sums sums) {
  return _mm512_dpbf16_ps(sums, weights, (__m512bh)_mm512_set1_epi32(x));
}

#elif defined(__AVX2__)

constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int) { return 1; }

struct Weights {
  Sums even, odd;
};
POLYSPEC_FN __m256 even_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
POLYSPEC_FN __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
POLYSPEC_FN Weights load_weights(const uint8_t* from) {
  const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + 1);
  return {{even_of(low), even_of(high)}, {odd_of(low), odd_of(high)}};
}
POLYSPEC_FN Sums fused(const Weights& weights, int32_t x, Sums sums) {
  const __m256i both = _mm256_set1_epi32(x);
  const __m256 even = even_of(both), odd = odd_of(both);
  return fused(weights.even, Sums{even, even}, fused(weights.odd, Sums{odd, odd}, sums));
}

#else

constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int) { return 1; }

struct Weights {
  Sums even, odd;
};
POLYSPEC_FN float even_of(int32_t pair) { return bit_cast<float>(pair << 16); }
POLYSPEC_FN float odd_of(int32_t pair) { return bit_cast<float>(pair & -65536); }
POLYSPEC_FN Weights load_weights(const uint8_t* from) {
  int32_t pairs[kLanes];
  memcpy(pairs, from, sizeof(pairs));
  Weights made;
  for (int64_t i = 0; i < kLanes; ++i) {
    made.even.lanes[i] = even_of(pairs[i]);
    made.odd.lanes[i] = odd_of(pairs[i]);
  }
  return made;
}
POLYSPEC_FN Sums fused(const Weights& weights, int32_t x, const Sums& sums) {
  return fused(weights.even, even_of(x), fused(weights.odd, odd_of(x), sums));
}

#endif

}  // namespace polyspec::POLYSPEC_CORE
