// Sixteen vectors of float32 or bfloat16 side by side, for products with sixteen keys at once.
#pragma once

#include "cpu/lanes.hpp"

namespace polyspec::POLYSPEC_CORE {

// to[i][k] = row k of `rows` at i, as float32, for i in [0, width); width is a multiple of 32.
#if defined(__AVX512F__)

POLYSPEC_FN void transpose(__m512i (&rows)[kLanes]) {
  __m512i pairs[kLanes], lanes[kLanes];
  unrolled<8>([&](auto i) POLYSPEC_INLINE {
    pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  });
  unrolled<8>([&](auto n) POLYSPEC_INLINE {
    constexpr int i = n / 2 * 4 + n % 2;  // lanes[4 a + b]: column b of each quarter, rows 4 a on
    constexpr int to = n / 2 * 4 + n % 2 * 2;
    lanes[to] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    lanes[to + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
  });
  unrolled<4>([&](auto i) POLYSPEC_INLINE {
    const __m512i a = _mm512_shuffle_i32x4(lanes[i], lanes[4 + i], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(lanes[i], lanes[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(lanes[8 + i], lanes[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(lanes[8 + i], lanes[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  });
}

template <class T>
void transpose(const T* const (&rows)[kLanes], int64_t width, float (*to)[kLanes]) {
  constexpr int64_t kStep = 64 / sizeof(T);
  for (int64_t begin = 0; begin < width; begin += kStep) {
    __m512i words[kLanes];
    unrolled<kLanes>([&](auto i)
                         POLYSPEC_INLINE { words[i] = _mm512_loadu_si512(rows[i] + begin); });
    transpose(words);
    unrolled<kLanes>([&](auto i) POLYSPEC_INLINE {
      if constexpr (sizeof(T) == 4) {
        _mm512_store_si512(to[begin + i], words[i]);
      } else {
        // A word is two neighbours, the first one in its low half.
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        _mm512_store_si512(to[begin + 2 * i], _mm512_slli_epi32(words[i], 16));
        _mm512_store_si512(to[begin + 2 * i + 1], _mm512_and_si512(words[i], high));
      }
    });
  }
}

#elif defined(__AVX2__)

POLYSPEC_FN void transpose(__m256i (&rows)[8]) {
  __m256i pairs[8], lanes[8];
  unrolled<4>([&](auto i) POLYSPEC_INLINE {
    pairs[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  });
  unrolled<4>([&](auto n) POLYSPEC_INLINE {
    constexpr int i = n / 2 * 4 + n % 2;
    constexpr int to = n / 2 * 4 + n % 2 * 2;
    lanes[to] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    lanes[to + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
  });
  unrolled<4>([&](auto i) POLYSPEC_INLINE {
    rows[i] = _mm256_permute2x128_si256(lanes[i], lanes[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(lanes[i], lanes[4 + i], 0x31);
  });
}

template <class T>
void transpose(const T* const (&rows)[kLanes], int64_t width, float (*to)[kLanes]) {
  constexpr int64_t kStep = 32 / sizeof(T);
  for (int64_t half = 0; half < kLanes; half += 8) {
    for (int64_t begin = 0; begin < width; begin += kStep) {
      __m256i words[8];
      unrolled<8>([&](auto i) POLYSPEC_INLINE {
        words[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[half + i] + begin));
      });
      transpose(words);
      const auto write = [&](int64_t column, __m256i word) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to[column] + half), word);
      };
      unrolled<8>([&](auto i) POLYSPEC_INLINE {
        if constexpr (sizeof(T) == 4) {
          write(begin + i, words[i]);
        } else {
          const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
          write(begin + 2 * i, _mm256_slli_epi32(words[i], 16));
          write(begin + 2 * i + 1, _mm256_and_si256(words[i], high));
        }
      });
    }
  }
}

#else

template <class T>
void transpose(const T* const (&rows)[kLanes], int64_t width, float (*to)[kLanes]) {
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t k = 0; k < kLanes; ++k) to[i][k] = to_float(rows[k][i]);
  }
}

#endif

}  // namespace polyspec::POLYSPEC_CORE
