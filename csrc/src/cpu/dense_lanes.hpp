// Sixteen outputs side by side: what one instruction set has for the loops of dense_product.cpp.
//
//   kMostTokens     how many tokens share a load of weights;
//   tiles_at_once   the most whose sums with so many tokens fit the registers;
//   Block<T>        the inputs of 16 outputs in a block, float or BFloat16;
//   load_block      reads one;
//   fused(w, x, s)  s plus the products of a block and 4 bytes of activations, the later input
//   first.
#pragma once

#include "cpu/dense_layout.hpp"
#include "cpu/lanes.hpp"

namespace polyspec::POLYSPEC_CORE {

template <class T>
struct Block;

template <>
struct Block<float> {
  Sums weights;
};
POLYSPEC_FN void load_block(const uint8_t* from, Block<float>* block) {
  block->weights = load(reinterpret_cast<const float*>(from));
}
POLYSPEC_FN Sums fused(const Block<float>& block, int32_t x, const Sums& sums) {
  return fused(block.weights, bit_cast<float>(x), sums);
}

#if defined(__AVX512BF16__)

// As many registers as sums, beside weights and activations.
constexpr int kMostTokens = 14;
constexpr int tiles_at_once(int tokens) { return 30 / (tokens + 1) < 4 ? 30 / (tokens + 1) : 4; }

template <>
struct Block<BFloat16> {
  __m512bh weights;
};
POLYSPEC_FN void load_block(const uint8_t* from, Block<BFloat16>* block) {
  block->weights = (__m512bh)_mm512_load_si512(from);
}
// The instruction rounds each of its two multiply-adds, and takes what is below 2^-126 for zero.
POLYSPEC_FN Sums fused(const Block<BFloat16>& block, int32_t x, Sums sums) {
  return _mm512_dpbf16_ps(sums, block.weights, (__m512bh)_mm512_set1_epi32(x));
}

#else

constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int) { return 1; }

template <>
struct Block<BFloat16> {
  Sums even, odd;
};
POLYSPEC_FN float even_of(int32_t pair) {
  return bit_cast<float>(static_cast<uint32_t>(pair) << 16);
}
POLYSPEC_FN float odd_of(int32_t pair) { return bit_cast<float>(pair & -65536); }
POLYSPEC_FN Sums fused(const Block<BFloat16>& block, int32_t x, const Sums& sums) {
  return fused(block.even, even_of(x), fused(block.odd, odd_of(x), sums));
}

#if defined(__AVX2__)
POLYSPEC_FN __m256 even_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
POLYSPEC_FN __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
POLYSPEC_FN void load_block(const uint8_t* from, Block<BFloat16>* block) {
  const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + 1);
  block->even = {even_of(low), even_of(high)};
  block->odd = {odd_of(low), odd_of(high)};
}
#else
POLYSPEC_FN void load_block(const uint8_t* from, Block<BFloat16>* block) {
  int32_t pairs[kLanes];
  memcpy(pairs, from, sizeof(pairs));
  for (int64_t i = 0; i < kLanes; ++i) {
    block->even.lanes[i] = even_of(pairs[i]);
    block->odd.lanes[i] = odd_of(pairs[i]);
  }
}
#endif

#endif

}  // namespace polyspec::POLYSPEC_CORE
