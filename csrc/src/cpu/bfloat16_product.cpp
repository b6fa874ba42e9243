// The bfloat16 product, compiled for one instruction set: POLYSPEC_ISA is baseline, avx2 or
// avx512bf16, and the build passes the matching compiler flags.
//
// An output is one chain of multiply-adds, whatever the instruction set, the number of tokens and
// the tiles beside: the result is always the same.
#include "cpu/bfloat16_lanes.hpp"
#include "cpu/bfloat16_tables.hpp"
#include "cpu/convert.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

// Bytes of weights that stay in a cache while several parts of the tokens go through them.
constexpr int64_t kCached = 256 << 10;

void prepare(const BFloat16ProductParams& params, int64_t first, int64_t tokens, int64_t part) {
  const int64_t inputs = params.shape.inputs, parts = parts_of(tokens, kMostTokens);
  const int64_t begin = part_begin(tokens, parts, part);
  const int64_t count = part_begin(tokens, parts, part + 1) - begin;
  const int64_t stride = params.x_stride;
  const uint16_t* x = static_cast<const uint16_t*>(params.x) + (first + begin) * stride;
  int32_t* to = static_cast<int32_t*>(params.workspace) + begin * ((inputs + 1) / 2);
  for (int64_t k = 0; k + 1 < inputs; k += 2, to += count) {
    for (int64_t m = 0; m < count; ++m) memcpy(to + m, x + m * stride + k, sizeof(*to));
  }
  if (inputs % 2 == 0) return;
  for (int64_t m = 0; m < count; ++m) to[m] = x[m * stride + inputs - 1];
}

struct Pass {
  const BFloat16ProductParams& params;
  BFloat16Layout layout;
  int64_t first;  // token

  static constexpr int kMostTokens = POLYSPEC_CORE::kMostTokens;
  static constexpr int tiles_at_once(int tokens) { return POLYSPEC_CORE::tiles_at_once(tokens); }

  template <int M, int N>
  void run(int64_t token, int64_t tile) const {
    const uint8_t* blocks = static_cast<const uint8_t*>(params.packed) + tile * layout.tile_bytes;
    const int32_t* x = static_cast<const int32_t*>(params.workspace) + token * layout.pairs;
    Sums sums[N][M];
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      unrolled<M>([&](auto m) POLYSPEC_INLINE { sums[n][m] = no_sums(); });
    });
    for (int64_t pair = 0; pair < layout.pairs; ++pair) {
      Weights weights[N];
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        weights[n] = load_weights(blocks + n * layout.tile_bytes);
      });
      unrolled<M>([&](auto m) POLYSPEC_INLINE {
        unrolled<N>([&](auto n)
                        POLYSPEC_INLINE { sums[n][m] = fused(weights[n], x[m], sums[n][m]); });
      });
      blocks += kPairBytes;
      x += M;
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) write(sums[n][m], first + token + m, tile + n);
    }
  }

  POLYSPEC_FN void write(const Sums& sums, int64_t token, int64_t tile) const {
    const int64_t begin = tile * kBFloat16Outputs;
    const int64_t rest = params.shape.outputs - begin;
    const int64_t count = rest < kBFloat16Outputs ? rest : kBFloat16Outputs;
    float values[kBFloat16Outputs];
    BFloat16 made[kBFloat16Outputs];
    store(values, sums);
    if (params.bias != nullptr) {
      const BFloat16* bias = static_cast<const BFloat16*>(params.bias) + begin;
      for (int64_t i = 0; i < count; ++i) values[i] += to_float(bias[i]);
    }
    for (int64_t i = 0; i < kBFloat16Outputs; ++i) {
      // One NaN for all: its sign and payload depend on the processor.
      convert(values[i] == values[i] ? values[i] : kNan, made + i);
    }
    memcpy(static_cast<BFloat16*>(params.y) + token * params.y_stride + begin, made,
           static_cast<size_t>(count) * sizeof(BFloat16));
  }
};

int64_t parts(int64_t tokens) { return parts_of(tokens, kMostTokens); }

int64_t at_once(int64_t tokens) {
  const int64_t parts = parts_of(tokens, kMostTokens);
  return tiles_at_once(static_cast<int>(parts_of(tokens, parts)));
}

void multiply(const BFloat16ProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  const FloatMode mode(FloatMode::kFlushed);
  const Pass pass{params, BFloat16Layout(params.shape), first};
  const int64_t tiles = at_once(tokens), cached = kCached / (tiles * pass.layout.tile_bytes);
  run_pass(pass, tokens, begin, end, tiles * (cached < 1 ? 1 : cached));
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

#define POLYSPEC_TABLE_baseline kBFloat16Baseline
#define POLYSPEC_TABLE_avx2 kBFloat16Avx2
#define POLYSPEC_TABLE_avx512bf16 kBFloat16Avx512Bf16
const BFloat16Product POLYSPEC_JOIN(POLYSPEC_TABLE_, POLYSPEC_ISA) = {
    &POLYSPEC_CORE::parts, &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
    &POLYSPEC_CORE::at_once, POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
