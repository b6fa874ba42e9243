// The arithmetic of a warp's product with 4-bit weights.
//
// A number q becomes 1 + q / 16, which is its bits after the bits of 1. A warp sums
//   u = sum x (1 + q / 16)   and   v = sum x
// of a group on the tensor cores, v with an all-1 matrix, and adds to its outputs
//   16 scale u + (zero - 24 scale) v  =  sum x ((q - 8) scale + zero).
// So weights are exact, and a scale is applied once for a group.
#pragma once

#include "core/int4_tiles.hpp"
#include "cuda/int4.hpp"
#include "cuda/tensor_core.cuh"

namespace polyspec::cuda {

using core::BFloat16;
using core::Float16;
using core::Int4Tiles;
using core::kTileInputs;
using core::kTileOutputs;

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarp * kWarps;
constexpr int kTokenTile = 8;  // tokens of an instruction

struct alignas(16) Vector {
  uint32_t words[4];
};
static_assert(sizeof(Vector) == core::kVectorBytes, "16 bytes");

// Numbers of a type with the bits of 1 before them: a pair, and the offset of the upper four bits
// of its fraction.
template <class T>
struct Bits;
template <>
struct Bits<BFloat16> {
  static constexpr uint32_t kUnits = 0x3f803f80u, kMask = 0x00780078u;
  static constexpr int kLeft = 3;
};
template <>
struct Bits<Float16> {
  static constexpr uint32_t kUnits = 0x3c003c00u, kMask = 0x03c003c0u;
  static constexpr int kLeft = 6;
};

// 1 + q / 16 of number `i` in each half of a word. Of bfloat16 the first numbers lie where they are
// needed.
template <class T>
__device__ __forceinline__ uint32_t weights_of(uint32_t word, int i) {
  const int right = (4 * i + core::kWordLeft - Bits<T>::kLeft) & 31;
  return masked(right == 0 ? word : word >> right | word << (32 - right), Bits<T>::kMask,
                Bits<T>::kUnits);
}

// A lane's share of sums over inputs: of two matrices of 16 outputs for each tile.
template <int kTiles, int kTokenTiles>
struct Sums {
  float of[2 * kTiles][kTokenTiles][4] = {};
};

// y += the sums of a group. `scales`: of each tile, 16 times the scale, and the zero, of a lane's
// outputs g, g + 8, g + 16 and g + 24, a pair of bfloat16 each.
template <int kTiles, int kTokenTiles>
__device__ __forceinline__ void add_group(Sums<kTiles, kTokenTiles>& y,
                                          const Sums<kTiles, kTokenTiles>& group,
                                          const float (&x)[kTokenTiles][4],
                                          const Vector (&scales)[kTiles]) {
  POLYSPEC_UNROLL
  for (int i = 0; i < 4 * kTiles; ++i) {
    const uint32_t both = scales[i / 4].words[i % 4];
    const float scale = core::bit_cast<float>(both << 16);
    const float zero = core::bit_cast<float>(both & 0xffff0000u);
    const float of_units = __builtin_fmaf(-1.5f, scale, zero);
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      POLYSPEC_UNROLL
      for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) {
        float& sum = y.of[i / 2][t][j];
        sum = __builtin_fmaf(of_units, x[t][j], sum);
        sum = __builtin_fmaf(scale, group.of[i / 2][t][j], sum);
      }
    }
  }
}

// Adds a chunk of 32 inputs to the sums of its group: a lane's vectors of weights and of tokens.
template <class T, int kTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_chunk(const Vector (&packed)[kTiles],
                                               const Vector (&x)[kTokenTiles],
                                               Sums<kTiles, kTokenTiles>& group) {
  POLYSPEC_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    POLYSPEC_UNROLL
    for (int step = 0; step < 2; ++step) {
      POLYSPEC_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t weights[4];
        POLYSPEC_UNROLL
        for (int i = 0; i < 4; ++i)
          weights[i] = weights_of<T>(packed[tile].words[2 * half + step], i);
        POLYSPEC_UNROLL
        for (int t = 0; t < kTokenTiles; ++t) {
          multiply<T>(group.of[2 * tile + half][t], weights, x[t].words[2 * step],
                      x[t].words[2 * step + 1]);
        }
      }
    }
  }
}

// And to the sums of activations: of tokens 2c and 2c + 1, and once more.
template <class T, int kTokenTiles>
__device__ __forceinline__ void add_chunk(const Vector (&x)[kTokenTiles],
                                          float (&of_x)[kTokenTiles][4]) {
  constexpr uint32_t kUnits[4] = {Bits<T>::kUnits, Bits<T>::kUnits, Bits<T>::kUnits,
                                  Bits<T>::kUnits};
  POLYSPEC_UNROLL
  for (int t = 0; t < kTokenTiles; ++t) {
    POLYSPEC_UNROLL
    for (int step = 0; step < 2; ++step)
      multiply<T>(of_x[t], kUnits, x[t].words[2 * step], x[t].words[2 * step + 1]);
  }
}

}  // namespace polyspec::cuda
