// The 4-bit product with matrix registers, for several tokens: few of them are sooner done with
// vectors, and the sums are the same.
#include "cpu/amx.hpp"
#include "cpu/copy.hpp"
#include "cpu/dot_lanes.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/int4_layout.hpp"
#include "cpu/int4_tables.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

// From how many tokens on.
constexpr int64_t kFewest = 13;
// Tiles of outputs that a load of activations serves.
constexpr int kTilesAtOnce = 2;
constexpr int64_t kMostParts = kInt4Tokens / kMatrixRows;
constexpr int64_t kMostGroup = 256;

// Inputs that one product of tiles takes, and how activations lie: [k / chunk, m, chunk].
int64_t chunk_of(int64_t group) { return group < kMatrixRowBytes ? group : kMatrixRowBytes; }

void prepare(const Int4ProductParams& params, int64_t first, int64_t tokens, int64_t begin,
             int64_t end) {
  if (tokens < kFewest) return cpu::kInt4Avx512Vnni.prepare(params, first, tokens, begin, end);
  const FloatMode mode;
  const auto round = [&](auto chunk) {
    round_rows<chunk>(params.x, params.dtype, params.x_stride, {first, tokens, begin, end},
                      params.shape.inputs, params.shape.group, kInt4Offset, values_of(params),
                      scales_of(params));
  };
  if (params.shape.group < kMatrixRowBytes) return round(std::integral_constant<int64_t, 32>());
  return round(std::integral_constant<int64_t, kMatrixRowBytes>());
}

// A group of 16 outputs as a product of tiles reads it: for each four inputs a row.
POLYSPEC_FN void unpack(const uint8_t* blocks, int64_t count, uint8_t* rows) {
  for (int64_t block = 0; block < count; ++block) {
    _mm512_store_si512(rows, step_weights<4>(blocks, 0));
    _mm512_store_si512(rows + kVectorBytes, step_weights<4>(blocks, 1));
    blocks += kBlockBytes;
    rows += 2 * kVectorBytes;
  }
}

// A group of a tile, unpacked; and for a tile and a part of the tokens the sums of a group, and the
// scaled sums of all groups.
using GroupWeights = uint8_t[kMostGroup * kInt4Outputs];
using PartDots = int32_t[kMatrixRows][kLanes];
using PartTotals = float[kMatrixRows][kLanes];

// `count` tokens from `first` on, in parts that fill a matrix register at most.
struct Pass {
  const Int4ProductParams& params;
  Int4Layout layout;
  int64_t first, count, parts;
  int64_t begins[kMostParts + 1];  // first tokens of the parts, and the end of the last

  Pass(const Int4ProductParams& params, int64_t first, int64_t count)
      : params(params),
        layout(params.shape),
        first(first),
        count(count),
        parts(parts_of(count, kMatrixRows)) {
    for (int64_t part = 0; part <= parts; ++part) begins[part] = part_begin(count, parts, part);
  }

  int64_t rows_of(int64_t part) const { return begins[part + 1] - begins[part]; }

  // Sums of R parts of the tokens from `part` on with a group of N tiles. Registers 0 to 3 hold
  // sums, 4 and 5 activations, 6 and 7 weights. The registers multiply while `meanwhile` runs,
  // which must be after their loads and before the code that waits for them.
  template <int R, int N, class Body>
  POLYSPEC_FN void multiply_group(int64_t part, int64_t group, const GroupWeights* weights,
                                  PartDots* dots, const Body& meanwhile) const {
    const int64_t inputs = params.shape.group, chunk = chunk_of(inputs);
    const int8_t* x[R];
    for (int r = 0; r < R; ++r)
      x[r] = values_of(params) + group * inputs * count + begins[part + r] * chunk;
    unrolled<R * N>([&](auto i) POLYSPEC_INLINE { clear_matrix<i>(); });
    for (int64_t k = 0; k < inputs; k += chunk) {
      unrolled<R>([&](auto r) POLYSPEC_INLINE {
        load_matrix<4 + r>(x[r], chunk);
        x[r] += chunk * count;
      });
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        load_matrix<6 + n>(weights[n] + k * kInt4Outputs, kMatrixRowBytes);
        unrolled<R>([&](auto r) POLYSPEC_INLINE { add_whole_products<r * N + n, 4 + r, 6 + n>(); });
      });
    }
    meanwhile();
    unrolled<R * N>([&](auto i) POLYSPEC_INLINE { store_matrix<i>(dots[i], kMatrixRowBytes); });
  }

  // N tiles of outputs from `tile` on with all tokens.
  template <int N>
  void run(int64_t tile) const {
    const uint8_t* const packed = params.packed + tile * layout.tile_bytes;
    alignas(64) GroupWeights weights[2][N];
    alignas(64) PartDots dots[2][2 * N];
    alignas(64) PartTotals totals[kMostParts * N] = {};
    const auto unpack_group = [&](int64_t group) POLYSPEC_INLINE {
      const uint8_t* const blocks = packed + group * layout.group_bytes + 2 * layout.scale_bytes;
      for (int n = 0; n < N; ++n)
        unpack(blocks + n * layout.tile_bytes, layout.blocks, weights[group % 2][n]);
    };
    // The last products, still to be scaled: of a group, parts [begin, end).
    int64_t group_before = 0, begin = 0, end = 0;
    int now = 0;
    const auto add_before = [&]() POLYSPEC_INLINE {
      add_group<N>(packed, group_before, begin, end, dots[1 - now], totals);
    };
    unpack_group(0);
    for (int64_t group = 0; group < layout.groups; ++group) {
      for (int64_t part = 0; part < parts; part += 2) {
        const auto meanwhile = [&]() POLYSPEC_INLINE {
          add_before();
          if (part == 0 && group + 1 < layout.groups) unpack_group(group + 1);
        };
        if (part + 2 <= parts) {
          multiply_group<2, N>(part, group, weights[group % 2], dots[now], meanwhile);
        } else {
          multiply_group<1, N>(part, group, weights[group % 2], dots[now], meanwhile);
        }
        group_before = group;
        begin = part;
        end = part + 2 < parts ? part + 2 : parts;
        now = 1 - now;
      }
    }
    add_before();
    int64_t at = first * params.y_stride;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t m = 0, rows = rows_of(part); m < rows; ++m, at += params.y_stride) {
        for (int n = 0; n < N; ++n)
          write_tile(load(totals[part * N + n][m]), tile + n, params.shape.outputs, params.dtype,
                     params.y, at);
      }
    }
  }

  // Scales a group's sums of parts [part, end) of the tokens, and prefetches their share of the
  // group's data for the next run.
  template <int N>
  POLYSPEC_FN void add_group(const uint8_t* packed, int64_t group, int64_t part, int64_t end,
                             const PartDots* dots, PartTotals* totals) const {
    const uint8_t* const head = packed + group * layout.group_bytes;
    const int64_t until = layout.group_bytes * end / parts;
    for (int64_t at = layout.group_bytes * part / parts; at < until; at += kVectorBytes) {
      for (int n = 0; n < N; ++n) __builtin_prefetch(head + (N + n) * layout.tile_bytes + at, 0, 2);
    }
    Sums scale[N], zero[N];
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      const uint8_t* const own = head + n * layout.tile_bytes;
      scale[n] = load_sixteen(own, params.shape.scale_dtype);
      zero[n] = load_sixteen(own + layout.scale_bytes, params.shape.scale_dtype);
    });
    const RoundedGroup* rounded = scales_of(params) + group * count + begins[part];
    for (totals += part * N; part < end; ++part, dots += N, totals += N) {
      for (int64_t m = 0, rows = rows_of(part); m < rows; ++m, ++rounded) {
        const RoundedGroup own = *rounded;
        unrolled<N>([&](auto n) POLYSPEC_INLINE {
          const Dots dot = _mm512_add_epi32(_mm512_load_si512(dots[n][m]), dots_from(own.start));
          const Sums sum = times(to_sums(dot), own.scale);
          float* const total = totals[n][m];
          store(total, fused(zero[n], own.sum, fused(sum, scale[n], load(total))));
        });
      }
    }
  }
};

void multiply(const Int4ProductParams& params, int64_t first, int64_t count, int64_t begin,
              int64_t end) {
  if (count < kFewest) return cpu::kInt4Avx512Vnni.multiply(params, first, count, begin, end);
  const FloatMode mode;
  const int64_t chunk = chunk_of(params.shape.group);
  const Pass pass(params, first, count);
  const int64_t tokens = (count + pass.parts - 1) / pass.parts;  // of the largest part
  const Matrices::Shape sums{tokens, kMatrixRowBytes}, rows{tokens, chunk};
  const Matrices::Shape columns{chunk / kStepInputs, kMatrixRowBytes};
  const Matrices set({sums, sums, sums, sums, rows, rows, columns, columns});
  for (; begin + kTilesAtOnce <= end; begin += kTilesAtOnce) pass.run<kTilesAtOnce>(begin);
  if (begin < end) pass.run<1>(begin);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Int4 kInt4Amx = {&POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply, "amx"};

}  // namespace polyspec::cpu
