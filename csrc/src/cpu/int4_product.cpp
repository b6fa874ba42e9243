// The 4-bit product, compiled for one instruction set: POLYSPEC_ISA is baseline, avx2 or
// avx512vnni, and the build passes the matching compiler flags.
//
// Sums of integers are exact, and those of float32 run group by group whatever the instruction set,
// the number of tokens and the tiles beside: the result is always the same.
#include "cpu/convert.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/int4_lanes.hpp"
#include "cpu/int4_tables.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

int8_t* values_of(const Int4ProductParams& params) {
  return static_cast<int8_t*>(params.workspace);
}
Int4Scale* scales_of(const Int4ProductParams& params) {
  return reinterpret_cast<Int4Scale*>(static_cast<char*>(params.workspace) +
                                      scales_at(params.shape));
}

constexpr int32_t kTiny = 0x0d800000;  // the bits of 2^-100: 127 / 2^-100 is far from overflow

// One token's activations of a group, at values + 32 of each chunk's `stride` bytes.
template <class T>
POLYSPEC_FN Int4Scale round_group(const T* x, int64_t group, int8_t* values, int64_t stride) {
  int32_t largest = 0;  // bits of the largest magnitude: those of a NaN are above all others
  for (int64_t k = 0; k < group; ++k) {
    const int32_t bits = bit_cast<int32_t>(to_float(x[k])) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const bool finite = largest < kOrderInfinity;
  if (!finite || largest < kTiny) {
    for (int64_t k = 0; k < group; k += kChunkInputs)
      memset(values + k / kChunkInputs * stride, 0, kChunkInputs);
    const float scale = finite ? 0.0f : kNan;
    return {scale, scale, 0};
  }
  const float scale = bit_cast<float>(largest) / 127.0f;
  const float inverse = 127.0f / bit_cast<float>(largest);
  int32_t sum = 0;
  for (int64_t begin = 0; begin < group; begin += kChunkInputs) {
    for (int64_t k = 0; k < kChunkInputs; ++k) {
      // Adding 1.5 * 2^23 rounds to an integer, ties to even, which the low bits then are.
      const float rounded = to_float(x[begin + k]) * inverse + 12582912.0f;
      const int8_t value = static_cast<int8_t>(bit_cast<int32_t>(rounded));
      values[k] = value;
      sum += value;
    }
    values += stride;
  }
  return {scale, scale * static_cast<float>(sum), -8 * sum};
}

template <class T>
void prepare_rows(const Int4ProductParams& params, int64_t first, int64_t tokens) {
  const int64_t group = params.shape.group, groups = params.shape.inputs / group;
  for (int64_t m = 0; m < tokens; ++m) {
    const T* x = static_cast<const T*>(params.x) + (first + m) * params.x_stride;
    for (int64_t g = 0; g < groups; ++g) {
      int8_t* values = values_of(params) + g * group * tokens + m * kChunkInputs;
      scales_of(params)[g * tokens + m] =
          round_group(x + g * group, group, values, tokens * kChunkInputs);
    }
  }
}

void prepare(const Int4ProductParams& params, int64_t first, int64_t tokens) {
  const FloatMode mode;
  switch (params.dtype) {
    case DType::kFloat32:
      return prepare_rows<float>(params, first, tokens);
    case DType::kBFloat16:
      return prepare_rows<BFloat16>(params, first, tokens);
    case DType::kFloat16:
      return prepare_rows<Float16>(params, first, tokens);
  }
}

template <class T>
POLYSPEC_FN void write(const Int4ProductParams& params, const Sums& total, int64_t token,
                       int64_t tile) {
  float values[kInt4Outputs];
  store(values, total);
  const int64_t begin = tile * kInt4Outputs, rest = params.shape.outputs - begin;
  write_outputs(values, rest < kInt4Outputs ? rest : kInt4Outputs,
                static_cast<T*>(params.y) + token * params.y_stride + begin);
}

POLYSPEC_FN void write(const Int4ProductParams& params, const Sums& total, int64_t token,
                       int64_t tile) {
  switch (params.dtype) {
    case DType::kFloat32:
      return write<float>(params, total, token, tile);
    case DType::kBFloat16:
      return write<BFloat16>(params, total, token, tile);
    case DType::kFloat16:
      return write<Float16>(params, total, token, tile);
  }
}

POLYSPEC_FN Sums load_row(const uint8_t* from, DType dtype) {
  return dtype == DType::kFloat32 ? load(reinterpret_cast<const float*>(from))
                                  : load(reinterpret_cast<const BFloat16*>(from));
}

// `count` tokens from `first` on.
struct Pass {
  const Int4ProductParams& params;
  Int4Layout layout;
  int64_t first, count;

  static constexpr int kMostTokens = POLYSPEC_CORE::kMostTokens;
  static constexpr int tiles_at_once(int tokens) { return POLYSPEC_CORE::tiles_at_once(tokens); }

  template <int M, int N>
  void run(int64_t token, int64_t tile) const {
    const DType scale_dtype = params.shape.scale_dtype;
    const uint8_t* packed = params.packed + tile * layout.tile_bytes;
    const int8_t* x = values_of(params) + token * kChunkInputs;
    const Int4Scale* scales = scales_of(params) + token;
    Sums totals[N][M];
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) totals[n][m] = no_sums();
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
      Dots dots[N][M];
      unrolled<M>([&](auto m) POLYSPEC_INLINE {
        unrolled<N>([&](auto n) POLYSPEC_INLINE { dots[n][m] = dots_from(scales[m].start); });
      });
      const uint8_t* blocks = packed + 2 * layout.scale_bytes;
      for (int64_t block = 0; block < layout.blocks; block += kChunkBlocks) {
        add_chunk(dots, blocks, layout.tile_bytes, x);
        blocks += kChunkBlocks * kBlockBytes;
        x += count * kChunkInputs;
      }
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        const uint8_t* head = packed + n * layout.tile_bytes;
        const Sums scale = load_row(head, scale_dtype);
        const Sums zero = load_row(head + layout.scale_bytes, scale_dtype);
        unrolled<M>([&](auto m) POLYSPEC_INLINE {
          const Sums sum = times(to_sums(dots[n][m]), scales[m].scale);
          totals[n][m] = fused(zero, scales[m].sum, fused(sum, scale, totals[n][m]));
        });
      });
      packed += layout.group_bytes;
      scales += count;
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) write(params, totals[n][m], first + token + m, tile + n);
    }
  }
};

// Tiles that all tokens go through while a cache holds them.
constexpr int64_t kTilesCached = 8;

void multiply(const Int4ProductParams& params, int64_t first, int64_t count, int64_t begin,
              int64_t end) {
  const FloatMode mode;
  run_pass(Pass{params, Int4Layout(params.shape), first, count}, count, begin, end, kTilesCached);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

#define POLYSPEC_TABLE_baseline kInt4Baseline
#define POLYSPEC_TABLE_avx2 kInt4Avx2
#define POLYSPEC_TABLE_avx512vnni kInt4Avx512Vnni
const Int4 POLYSPEC_JOIN(POLYSPEC_TABLE_, POLYSPEC_ISA) = {
    &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply, POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
