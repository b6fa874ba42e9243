// The 4-bit product, compiled for one instruction set: POLYSPEC_ISA is baseline, avx2, avx512 or
// avx512bf16, and the build passes the matching compiler flags.
//
// Every sum runs over its inputs in the same order, whatever the number of tokens and of tiles
// beside it: group by group, in each first the products of q - 8, then its scale and its zero.
#define POLYSPEC_JOIN_(a, b) a##b
#define POLYSPEC_JOIN(a, b) POLYSPEC_JOIN_(a, b)
#define POLYSPEC_STRING_(a) #a
#define POLYSPEC_STRING(a) POLYSPEC_STRING_(a)
#define POLYSPEC_CORE POLYSPEC_JOIN(core_, POLYSPEC_ISA)

#include "cpu/float_mode.hpp"
#include "cpu/int4_lanes.hpp"
#include "cpu/int4_tables.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

// To the nearest, ties to even.
POLYSPEC_FN BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
POLYSPEC_FN Float16 to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below the normal ones: adding 1/2 shifts them into place
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

POLYSPEC_FN void convert(float value, float* to) { *to = value; }
POLYSPEC_FN void convert(float value, BFloat16* to) { *to = to_bfloat16(value); }
POLYSPEC_FN void convert(float value, Float16* to) { *to = to_float16(value); }

Input* inputs_of(const Int4ProductParams& params) { return static_cast<Input*>(params.workspace); }
float* sums_of(const Int4ProductParams& params) {
  return reinterpret_cast<float*>(static_cast<char*>(params.workspace) + sums_at(params.shape));
}

template <class T>
void prepare_rows(const Int4ProductParams& params, int64_t first, int64_t tokens) {
  const int64_t inputs = params.shape.inputs, group = params.shape.group;
  float* sums = sums_of(params);
  for (int64_t m = 0; m < tokens; ++m) {
    const T* x = static_cast<const T*>(params.x) + (first + m) * params.x_stride;
    for (int64_t begin = 0; begin < inputs; begin += group) {
      Input* made = inputs_of(params) + (begin * tokens + m * group);
      float parts[kInt4Outputs] = {};
      for (int64_t k = 0; k < group; k += kInt4Outputs) {
        for (int64_t i = 0; i < kInt4Outputs; ++i) {
          convert(to_float(x[begin + k + i]), made + k + i);
          parts[i] += to_float(made[k + i]);
        }
      }
      for (int64_t half = kInt4Outputs / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
      }
      *sums++ = parts[0];
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

// What is at work for some tiles and tokens.
struct Pass {
  const Int4Layout& layout;
  const uint8_t* packed;  // the first tile
  const Input* inputs;    // of the first group
  const float* sums;
  int64_t tokens;
  bool float_scales;
};

constexpr int kPlaces = static_cast<int>(kBlockInputs / kStep);
constexpr int64_t kMaxBlocks = 256 / kBlockInputs;

// Adds the products of place kPlace of a block, and of those behind it.
template <int kPlace, int M, int N, class Source>
POLYSPEC_FN void add_block(Sums (&sums)[N][M], const Source& source, int64_t block,
                           const Input* inputs, int64_t stride) {
  if constexpr (kPlace < kPlaces) {
    Weights weights[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) weights[n] = source.template at<kPlace>(n, block);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        sums[n][m] =
            multiplied<kPlace>(sums[n][m], weights[n], inputs + m * stride + block * kBlockInputs);
      }
    }
    add_block<kPlace + 1>(sums, source, block, inputs, stride);
  }
}

// The weights of a group as they lie in its tiles.
struct Packed {
  const uint8_t* blocks;
  int64_t tile_bytes;
  template <int kPlace>
  POLYSPEC_FN Weights at(int n, int64_t block) const {
    return unpacked<kPlace>(blocks + n * tile_bytes + block * kBlockBytes);
  }
};

// The weights of a group of one tile, unpacked for more tokens than the registers have sums for.
struct Unpacked {
  Weights weights[kMaxBlocks][kPlaces];
  template <int kPlace>
  POLYSPEC_FN void fill(const Packed& from, int64_t block) {
    if constexpr (kPlace < kPlaces) {
      weights[block][kPlace] = from.at<kPlace>(0, block);
      fill<kPlace + 1>(from, block);
    }
  }
  template <int kPlace>
  POLYSPEC_FN const Weights& at(int, int64_t block) const {
    return weights[block][kPlace];
  }
};

// totals += the products of one group with M tokens from `token` on.
template <int M, int N, class Source>
POLYSPEC_FN void add_group(const Pass& pass, const Source& source, int64_t group, int64_t token,
                           Sums (*totals)[kInt4Tokens]) {
  Sums sums[N][M];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sums[n][m] = no_sums();
  }
  const int64_t stride = pass.layout.blocks * kBlockInputs;
  const Input* inputs = pass.inputs + (group * pass.tokens + token) * stride;
  for (int64_t block = 0; block < pass.layout.blocks; ++block)
    add_block<0>(sums, source, block, inputs, stride);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const uint8_t* head =
        pass.packed + n * pass.layout.tile_bytes + group * pass.layout.group_bytes;
    const uint8_t* tail = head + pass.layout.scale_bytes;
    const Sums scale = pass.float_scales ? load(reinterpret_cast<const float*>(head))
                                         : load(reinterpret_cast<const BFloat16*>(head));
    const Sums zero = pass.float_scales ? load(reinterpret_cast<const float*>(tail))
                                        : load(reinterpret_cast<const BFloat16*>(tail));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float sum = pass.sums[(token + m) * pass.layout.groups + group];
      Sums& total = totals[n][token + m];
      total = fused(zero, sum, fused(sums[n][m], scale, total));
    }
  }
}

// Up to kSums tokens of one unpacked group.
template <int M>
void add_unpacked(const Pass& pass, const Unpacked& source, int64_t group, int64_t token,
                  int64_t tokens, Sums (*totals)[kInt4Tokens]) {
  if constexpr (M > 0) {
    if (tokens == M) return add_group<M, 1>(pass, source, group, token, totals);
    add_unpacked<M - 1>(pass, source, group, token, tokens, totals);
  }
}

template <int M, int N>
void add_tiles(const Pass& pass, Sums (*totals)[kInt4Tokens]) {
  for (int64_t group = 0; group < pass.layout.groups; ++group) {
    const Packed packed{pass.packed + group * pass.layout.group_bytes + 2 * pass.layout.scale_bytes,
                        pass.layout.tile_bytes};
    if constexpr (M * N <= kSums) {
      add_group<M, N>(pass, packed, group, 0, totals);
    } else {
      static_assert(N == 1, "several tiles at once need registers for all their sums");
      Unpacked weights;
      for (int64_t block = 0; block < pass.layout.blocks; ++block) weights.fill<0>(packed, block);
      for (int64_t token = 0; token < M; token += kSums) {
        const int64_t tokens = M - token < kSums ? M - token : kSums;
        add_unpacked<kSums>(pass, weights, group, token, tokens, totals);
      }
    }
  }
}

template <class T>
void write(const Int4ProductParams& params, const Sums& total, int64_t token, int64_t tile) {
  float values[kInt4Outputs];
  store(values, total);
  const int64_t begin = tile * kInt4Outputs, rest = params.shape.outputs - begin;
  const int64_t count = rest < kInt4Outputs ? rest : kInt4Outputs;
  T* y = static_cast<T*>(params.y) + token * params.y_stride + begin;
  for (int64_t i = 0; i < count; ++i) convert(values[i], y + i);
}

void write(const Int4ProductParams& params, const Sums& total, int64_t token, int64_t tile) {
  switch (params.dtype) {
    case DType::kFloat32:
      return write<float>(params, total, token, tile);
    case DType::kBFloat16:
      return write<BFloat16>(params, total, token, tile);
    case DType::kFloat16:
      return write<Float16>(params, total, token, tile);
  }
}

// As many tiles at once as there are registers for: one load of an activation serves them all, and
// one token alone has enough sums in flight.
constexpr int tiles_at_once(int tokens) {
  const int fit = kSums / tokens;
  return fit > 8 ? 8 : fit < 1 ? 1 : fit;
}

template <int M, int N>
void run_tiles(const Int4ProductParams& params, const Int4Layout& layout, int64_t first,
               int64_t begin, int64_t end) {
  int64_t tile = begin;
  for (; tile + N <= end; tile += N) {
    const Pass pass{
        layout, params.packed + tile * layout.tile_bytes,   inputs_of(params), sums_of(params),
        M,      params.shape.scale_dtype == DType::kFloat32};
    Sums totals[N][kInt4Tokens];
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) totals[n][m] = no_sums();
    }
    add_tiles<M, N>(pass, totals);
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) write(params, totals[n][m], first + m, tile + n);
    }
  }
  if constexpr (N > 1) run_tiles<M, N / 2>(params, layout, first, tile, end);
}

template <int M>
void run_tokens(const Int4ProductParams& params, const Int4Layout& layout, int64_t first,
                int64_t tokens, int64_t begin, int64_t end) {
  if constexpr (M > 0) {
    if (tokens == M) return run_tiles<M, tiles_at_once(M)>(params, layout, first, begin, end);
    run_tokens<M - 1>(params, layout, first, tokens, begin, end);
  }
}

void multiply(const Int4ProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  const FloatMode mode;
  const Int4Layout layout(params.shape);
  run_tokens<kInt4Tokens>(params, layout, first, tokens, begin, end);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

#define POLYSPEC_TABLE_baseline kInt4Baseline
#define POLYSPEC_TABLE_avx2 kInt4Avx2
#define POLYSPEC_TABLE_avx512 kInt4Avx512
#define POLYSPEC_TABLE_avx512bf16 kInt4Avx512Bf16
const Int4 POLYSPEC_JOIN(POLYSPEC_TABLE_, POLYSPEC_ISA) = {
    &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply, POLYSPEC_CORE::kRoundsActivations,
    POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
