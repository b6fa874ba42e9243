// The 4-bit product, compiled for one instruction set: POLYSPEC_ISA is baseline, dotprod, avx2,
// avxvnni or avx512vnni, and the build passes the matching compiler flags.
//
// Sums of integers are exact, and sums of float32 run group by group independently of the
// instruction set, the number of tokens and the neighbouring tiles: the result is always the same.
#include "cpu/copy.hpp"
#include "cpu/dot_lanes.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/int4_layout.hpp"
#include "cpu/int4_tables.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

static_assert(bias_of<4>() == 0, "sums are those of q");

void prepare(const Int4ProductParams& params, int64_t first, int64_t tokens, int64_t begin,
             int64_t end) {
  const FloatMode mode;
  round_rows<kChunkInputs>(params.x, params.dtype, params.x_stride, {first, tokens, begin, end},
                           params.shape.inputs, params.shape.group, kInt4Offset, values_of(params),
                           scales_of(params));
}

#if defined(__AVX512VNNI__)
constexpr int kMostTokens = 16;
constexpr int tiles_at_once(int tokens) { return tokens < 6 ? 4 : tokens < 13 ? 2 : 1; }
#elif defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kMostTokens = 6;
constexpr int tiles_at_once(int tokens) { return tokens < 3 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kMostTokens = 6;
constexpr int tiles_at_once(int tokens) { return tokens < 5 ? 4 / tokens : 1; }
#else
constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int tokens) { return 4 / tokens; }
#endif

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
    const RoundedGroup* scales = scales_of(params) + token;
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
        add_chunk<4, kChunkInputs>(dots, blocks, layout.tile_bytes, x);
        blocks += kChunkBlocks * kBlockBytes;
        x += count * kChunkInputs;
      }
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        const uint8_t* head = packed + n * layout.tile_bytes;
        const Sums scale = load_sixteen(head, scale_dtype);
        const Sums zero = load_sixteen(head + layout.scale_bytes, scale_dtype);
        unrolled<M>([&](auto m) POLYSPEC_INLINE {
          const Sums sum = times(to_sums(dots[n][m]), scales[m].scale);
          totals[n][m] = fused(zero, scales[m].sum, fused(sum, scale, totals[n][m]));
        });
      });
      packed += layout.group_bytes;
      scales += count;
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) {
        const int64_t at = (first + token + m) * params.y_stride;
        write_tile(totals[n][m], tile + n, params.shape.outputs, params.dtype, params.y, at);
      }
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

const Int4 POLYSPEC_COPY(kInt4) = {&POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
                                   POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
