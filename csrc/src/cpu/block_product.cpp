// The product with GGUF blocks, compiled for one instruction set: POLYSPEC_ISA is baseline,
// dotprod, avx2, avxvnni or avx512vnni, and the build passes the matching compiler flags.
//
// Sums of integers are exact, and sums of float32 run group by group independently of the
// instruction set, the number of tokens and the neighbouring tiles: the result is always the same.
#include "cpu/block_layout.hpp"
#include "cpu/block_tables.hpp"
#include "cpu/copy.hpp"
#include "cpu/dot_lanes.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

int8_t* values_of(const BlockProductParams& params) {
  return static_cast<int8_t*>(params.workspace);
}
RoundedGroup* groups_of(const BlockProductParams& params) {
  return reinterpret_cast<RoundedGroup*>(static_cast<char*>(params.workspace) +
                                         block_groups_at(params.shape));
}

void prepare(const BlockProductParams& params, int64_t first, int64_t tokens, int64_t begin,
             int64_t end) {
  const FloatMode mode;
  const BlockForm form = form_of(params.shape.type);
  const int32_t offset = form.offset + (form.bits == 8 ? bias_of<8>() : 0);
  const auto round = [&](auto group) {
    round_rows<group>(params.x, params.dtype, params.x_stride, {first, tokens, begin, end},
                      params.shape.inputs, group, offset, values_of(params), groups_of(params));
  };
  if (form.group == 16) return round(std::integral_constant<int64_t, 16>());
  return round(std::integral_constant<int64_t, 32>());
}

// Two times 16 float16, unsigned and signed whole numbers, converted to Sums.
#if defined(__AVX512F__)
POLYSPEC_FN __m128i sixteen(const uint8_t* from) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(from));
}
POLYSPEC_FN Sums load_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
}
POLYSPEC_FN Sums load_unsigned(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(from)));
}
POLYSPEC_FN Sums load_signed(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(from)));
}
#elif defined(__AVX2__)
POLYSPEC_FN __m128i half_of(const uint8_t* from, int64_t bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + bytes));
}
POLYSPEC_FN __m128i eight(const uint8_t* from, int64_t bytes) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + bytes));
}
POLYSPEC_FN Sums load_halves(const uint8_t* from) {
  return {_mm256_cvtph_ps(half_of(from, 0)), _mm256_cvtph_ps(half_of(from, 16))};
}
POLYSPEC_FN Sums load_unsigned(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(from, 0))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(from, 8)))};
}
POLYSPEC_FN Sums load_signed(const uint8_t* from) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(from, 0))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(from, 8)))};
}
#else
template <class T>
POLYSPEC_FN Sums load_whole(const uint8_t* from) {
  float made[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) made[i] = static_cast<float>(static_cast<T>(from[i]));
  return load(made);
}
#if defined(__aarch64__)
POLYSPEC_FN Sums load_halves(const uint8_t* from) {
  return by_quarters([&](int i) POLYSPEC_INLINE {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i)));
  });
}
#else
POLYSPEC_FN Sums load_halves(const uint8_t* from) {
  Float16 halves[kLanes];
  memcpy(halves, from, sizeof(halves));
  return load(halves);
}
#endif
POLYSPEC_FN Sums load_unsigned(const uint8_t* from) { return load_whole<uint8_t>(from); }
POLYSPEC_FN Sums load_signed(const uint8_t* from) { return load_whole<int8_t>(from); }
#endif

// Sums of a run, and weights, fit the registers.
#if defined(__AVX512VNNI__)
constexpr int kMostTokens = 8;
constexpr int tiles_at_once(int tokens) { return tokens < 4 ? 4 : 2; }
#elif defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kMostTokens = 6;
constexpr int tiles_at_once(int tokens) { return tokens < 3 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int tokens) { return tokens < 2 ? 2 : 1; }
#else
constexpr int kMostTokens = 4;
constexpr int tiles_at_once(int) { return 1; }
#endif

// `count` tokens from `first` on, with weights of kBits in groups of kInputs.
template <int kBits, int kInputs>
struct Pass {
  const BlockProductParams& params;
  BlockLayout layout;
  int64_t first, count;

  static constexpr int kMostTokens = POLYSPEC_CORE::kMostTokens;
  static constexpr int tiles_at_once(int tokens) { return POLYSPEC_CORE::tiles_at_once(tokens); }

  // The scales of a group of 16 outputs; products of so few bits are exact.
  POLYSPEC_FN Sums scales_of(const uint8_t* block, int64_t group) const {
    const Sums scale = load_halves(block);
    if (!layout.form.scaled) return scale;
    const uint8_t* whole = block + kHeadBytes + group * layout.scale_bytes;
    return times(scale, layout.form.minima ? load_unsigned(whole) : load_signed(whole));
  }
  POLYSPEC_FN Sums minima_of(const uint8_t* block, int64_t group) const {
    const Sums minimum = load_halves(block + kHeadBytes / 2);
    if (!layout.form.scaled) return minimum;
    const uint8_t* whole = block + kHeadBytes + group * layout.scale_bytes + kBlockOutputs;
    return times(minimum, load_unsigned(whole));
  }

  template <int M, int N>
  void run(int64_t token, int64_t tile) const {
    const uint8_t* block = params.packed + tile * layout.tile_bytes;
    const int8_t* x = values_of(params) + token * kInputs;
    const RoundedGroup* groups = groups_of(params) + token;
    Sums totals[N][M];
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) totals[n][m] = no_sums();
    }
    for (int64_t i = 0; i < layout.blocks; ++i) {
      const uint8_t* weights = block + layout.head_bytes;
      for (int64_t group = 0; group < layout.groups; ++group) {
        Dots dots[N][M];
        unrolled<M>([&](auto m) POLYSPEC_INLINE {
          unrolled<N>([&](auto n) POLYSPEC_INLINE { dots[n][m] = dots_from(groups[m].start); });
        });
        add_chunk<kBits, kInputs>(dots, weights, layout.tile_bytes, x);
        unrolled<N>([&](auto n) POLYSPEC_INLINE {
          const uint8_t* head = block + n * layout.tile_bytes;
          const Sums scale = scales_of(head, group);
          unrolled<M>([&](auto m) POLYSPEC_INLINE {
            const Sums sum = times(to_sums(dots[n][m]), groups[m].scale);
            totals[n][m] = fused(sum, scale, totals[n][m]);
          });
          if (layout.form.minima) {
            const Sums minimum = minima_of(head, group);
            unrolled<M>([&](auto m) POLYSPEC_INLINE {
              totals[n][m] = fused(minimum, groups[m].sum, totals[n][m]);
            });
          }
        });
        weights += group_bytes_of(kBits, kInputs);
        x += count * kInputs;
        groups += count;
      }
      block += layout.block_bytes;
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

void multiply(const BlockProductParams& params, int64_t first, int64_t count, int64_t begin,
              int64_t end) {
  const FloatMode mode;
  const BlockLayout layout(params.shape);
  const auto run = [&](auto bits, auto inputs) {
    run_pass(Pass<bits, inputs>{params, layout, first, count}, count, begin, end, kTilesCached);
  };
  const std::integral_constant<int, 32> inputs;
  switch (layout.form.bits) {
    case 4:
      return run(std::integral_constant<int, 4>(), inputs);
    case 8:
      return run(std::integral_constant<int, 8>(), inputs);
    default:
      break;
  }
  const std::integral_constant<int, 6> bits;
  if (layout.form.group == 32) return run(bits, inputs);
  return run(bits, std::integral_constant<int, 16>());
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Blocks POLYSPEC_COPY(kBlocks) = {&POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
                                       POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
