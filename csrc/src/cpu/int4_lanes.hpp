// Sixteen outputs side by side: what one instruction set has for the loops of int4_product.cpp.
//
//   Dots          16 sums of products of integers, exact;
//   kMostTokens   how many tokens share a weight's unpacking;
//   tiles_at_once of 4, 2 or 1 the most whose sums with so many tokens fit the registers;
//   add_chunk     dots[n][m] += the products of 32 inputs of tile n with those of token m.
//
// One load of an activation serves all tiles at once, and several keep enough sums in flight.
// Blocks of 64 bytes and the 32 bytes of a token are those of int4_layout.hpp.
#pragma once

#include "cpu/int4_layout.hpp"
#include "cpu/lanes.hpp"
#include "cpu/prefetch.hpp"

namespace polyspec::POLYSPEC_CORE {

// Inputs 4 i to 4 i + 3 of a token.
POLYSPEC_FN int32_t four_of(const int8_t* x, int64_t i) {
  int32_t four;
  memcpy(&four, x + 4 * i, sizeof(four));
  return four;
}

#if defined(__AVX512VNNI__)

using Dots = __m512i;
constexpr int kMostTokens = 16;
constexpr int tiles_at_once(int tokens) { return tokens < 6 ? 4 : tokens < 13 ? 2 : 1; }

POLYSPEC_FN Dots dots_from(int32_t value) { return _mm512_set1_epi32(value); }
POLYSPEC_FN Sums to_sums(Dots dots) { return _mm512_cvtepi32_ps(dots); }
template <int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* blocks, int64_t tile_bytes,
                           const int8_t* x) {
  const __m512i mask = _mm512_set1_epi8(15);
  // Unrolled by the compiler: eight copies of all that is inlined here would take it twice as long.
#pragma GCC unroll 8
  for (int64_t i = 0; i < kChunkInputs / 4; ++i) {
    __m512i weights[N];
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      const uint8_t* from = blocks + n * tile_bytes + i / 2 * kBlockBytes;
      if (i % 2 == 0) prefetch(from, N * tile_bytes);
      const __m512i both = _mm512_load_si512(from);
      weights[n] = _mm512_and_si512(i % 2 == 0 ? both : _mm512_srli_epi16(both, 4), mask);
    });
    unrolled<M>([&](auto m) POLYSPEC_INLINE {
      const __m512i four = _mm512_set1_epi32(four_of(x + m * kChunkInputs, i));
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        dots[n][m] = _mm512_dpbusd_epi32(dots[n][m], weights[n], four);
      });
    });
  }
}

#elif defined(__AVX2__)

struct Dots {
  __m256i low, high;
};
constexpr int kMostTokens = 6;
constexpr int tiles_at_once(int tokens) { return tokens < 5 ? 4 / tokens : 1; }

POLYSPEC_FN Dots dots_from(int32_t value) {
  return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}
POLYSPEC_FN Sums to_sums(Dots dots) {
  return {_mm256_cvtepi32_ps(dots.low), _mm256_cvtepi32_ps(dots.high)};
}
// A chunk's sums fit 16 bits: 8 times two products of at most 15 * 127 each make 30480.
template <int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* blocks, int64_t tile_bytes,
                           const int8_t* x) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i low[N][M], high[N][M];
  unrolled<kChunkBlocks>([&](auto block) POLYSPEC_INLINE {
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      const uint8_t* from = blocks + n * tile_bytes + block * kBlockBytes;
      prefetch(from, N * tile_bytes);
      unrolled<2>([&](auto i) POLYSPEC_INLINE {
        const auto half = [&](int64_t at) POLYSPEC_INLINE {
          const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + at));
          return _mm256_and_si256(i == 0 ? both : _mm256_srli_epi16(both, 4), mask);
        };
        const __m256i first = half(0), second = half(kBlockBytes / 2);
        unrolled<M>([&](auto m) POLYSPEC_INLINE {
          const __m256i four = _mm256_set1_epi32(four_of(x + m * kChunkInputs, 2 * block + i));
          const auto add = [&](__m256i& sum, __m256i weights) POLYSPEC_INLINE {
            const __m256i products = _mm256_maddubs_epi16(weights, four);
            sum = block + i == 0 ? products : _mm256_add_epi16(sum, products);
            // Else GCC would add up products first, and have no registers for so many.
            asm("" : "+x"(sum));
          };
          add(low[n][m], first);
          add(high[n][m], second);
        });
      });
    });
  });
  unrolled<N>([&](auto n) POLYSPEC_INLINE {
    unrolled<M>([&](auto m) POLYSPEC_INLINE {
      Dots& sum = dots[n][m];
      sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(low[n][m], ones));
      sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(high[n][m], ones));
    });
  });
}

#else

struct Dots {
  int32_t lanes[kInt4Outputs];
};
constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int tokens) { return 4 / tokens; }

POLYSPEC_FN Dots dots_from(int32_t value) {
  Dots made;
  for (int32_t& lane : made.lanes) lane = value;
  return made;
}
POLYSPEC_FN Sums to_sums(const Dots& dots) {
  Sums made;
  for (int64_t i = 0; i < kInt4Outputs; ++i) made.lanes[i] = static_cast<float>(dots.lanes[i]);
  return made;
}
template <int M, int N>
POLYSPEC_FN void add_chunk(Dots (&dots)[N][M], const uint8_t* blocks, int64_t tile_bytes,
                           const int8_t* x) {
  for (int64_t block = 0; block < kChunkBlocks; ++block, blocks += kBlockBytes) {
    for (int m = 0; m < M; ++m) {
      const int8_t* eight = x + m * kChunkInputs + block * kBlockInputs;
      for (int n = 0; n < N; ++n) {
        const uint8_t* bytes = blocks + n * tile_bytes;
        for (int64_t i = 0; i < kInt4Outputs; ++i) {
          int32_t sum = 0;
          for (int64_t j = 0; j < 4; ++j) {
            const uint8_t both = bytes[4 * i + j];
            sum += (both & 15) * eight[j] + (both >> 4) * eight[4 + j];
          }
          dots[n][m].lanes[i] += sum;
        }
      }
    }
  }
}

#endif

}  // namespace polyspec::POLYSPEC_CORE
