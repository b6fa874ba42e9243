// The dense product in bfloat16 with matrix registers: many tokens take as long as one, until they
// are more than a register has rows. In float32, which these registers do not multiply, it is the
// product with vectors.
#include "cpu/amx.hpp"
#include "cpu/convert.hpp"
#include "cpu/copy.hpp"
#include "cpu/dense_layout.hpp"
#include "cpu/dense_output.hpp"
#include "cpu/dense_tables.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/lanes.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

const cpu::Dense& vectors() { return cpu::kDenseAvx512Bf16; }
bool with_vectors(const DenseProductParams& params) {
  return params.shape.dtype == DType::kFloat32;
}

// Inputs of a product of tiles.
constexpr int64_t kStepInputs = kMatrixRowBytes / 2;

// Of many tokens: steps whose weights stay in the first cache while all tokens go through them, and
// tiles that go through their activations while the second cache holds those.
constexpr int64_t kStepsCached = 8;
constexpr int64_t kTilesCached = 8;
constexpr int64_t kMostParts = kDenseTokens / kMatrixRows;

// Of a part of the tokens and a tile of outputs.
using PartSums = float[kMatrixRows][kDenseOutputs];

// The workspace of a pass of m tokens: activations [steps, m, 32], zeros behind the last inputs.
void prepare(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t part) {
  if (with_vectors(params)) return vectors().prepare(params, first, tokens, part);
  const int64_t parts = vectors().parts(tokens), inputs = params.shape.inputs;
  const int64_t begin = part_begin(tokens, parts, part), end = part_begin(tokens, parts, part + 1);
  const BFloat16* const x = static_cast<const BFloat16*>(params.x) + first * params.x_stride;
  char* to = static_cast<char*>(params.workspace);
  // Rows within steps: a row's steps lie far apart.
  for (int64_t k = 0; k < inputs; k += kStepInputs, to += tokens * kMatrixRowBytes) {
    const int64_t count = k + kStepInputs < inputs ? kStepInputs : inputs - k;
    for (int64_t m = begin; m < end; ++m) {
      const BFloat16* const from = x + m * params.x_stride + k;
      char* const row = to + m * kMatrixRowBytes;
      if (count == kStepInputs) {
        memcpy(row, from, kMatrixRowBytes);
      } else {
        memset(row, 0, kMatrixRowBytes);
        memcpy(row, from, static_cast<size_t>(count) * sizeof(BFloat16));
      }
    }
  }
}

// `tokens` of them from `first` on.
struct Pass {
  const DenseProductParams& params;
  DenseLayout layout;
  int64_t first, tokens, parts, steps;

  // The last part is one of the largest, so that no register is loaded from behind it.
  int64_t begin_of(int64_t part) const { return part_begin(tokens, parts, part); }

  // The products of a step's activations and weights.
  template <int R, int N>
  POLYSPEC_FN void add(const char* x, int64_t part, const uint8_t* weights,
                       int64_t tile_bytes) const {
    unrolled<R>([&](auto r) POLYSPEC_INLINE {
      load_matrix<4 + r>(x + begin_of(part + r) * kMatrixRowBytes, kMatrixRowBytes);
    });
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      load_matrix<6 + n % 2>(weights + n * tile_bytes, kMatrixRowBytes);
      unrolled<R>([&](auto r)
                      POLYSPEC_INLINE { add_bfloat16_products<r * N + n, 4 + r, 6 + n % 2>(); });
    });
  }

  // Steps [begin, end) of R parts of the tokens from `part` on with N tiles of outputs from `tile`
  // on. sums[n * stride + r] holds those of the steps before, and then of these. Registers 0 to 3
  // hold sums, 4 and 5 activations, 6 and 7 weights.
  template <int R, int N>
  void run(int64_t part, int64_t tile, int64_t begin, int64_t end, PartSums* sums,
           int64_t stride) const {
    static_assert(R <= 2 && R * N <= 4, "registers");
    const char* x = static_cast<const char*>(params.workspace) + begin * tokens * kMatrixRowBytes;
    const uint8_t* from = static_cast<const uint8_t*>(params.packed) + tile * layout.tile_bytes +
                          begin * kMatrixBytes;
    const auto each_sum = [&](const auto& body) POLYSPEC_INLINE {
      unrolled<R>([&](auto r) POLYSPEC_INLINE {
        unrolled<N>([&](auto n) POLYSPEC_INLINE {
          body(std::integral_constant<int, r * N + n>(), sums[n * stride + r]);
        });
      });
    };
    if (begin == 0) {
      unrolled<R * N>([&](auto i) POLYSPEC_INLINE { clear_matrix<i>(); });
    } else {
      each_sum([](auto i, PartSums& sum) POLYSPEC_INLINE { load_matrix<i>(sum, kMatrixRowBytes); });
    }
    const int64_t whole = end * kMatrixRows > layout.blocks ? end - 1 : end;
    for (int64_t step = begin; step < whole; ++step) {
      if (part == 0) {  // for the parts behind it as well
        unrolled<N>([&](auto n) POLYSPEC_INLINE {
          for (int64_t row = 0; row < kMatrixRows; ++row)
            prefetch(from + n * layout.tile_bytes + row * kBlockBytes, N * layout.tile_bytes);
        });
      }
      add<R, N>(x, part, from, layout.tile_bytes);
      x += tokens * kMatrixRowBytes;
      from += kMatrixBytes;
    }
    if (whole < end) {
      const int64_t rest = layout.blocks - whole * kMatrixRows;
      alignas(64) uint8_t last[N][kMatrixBytes] = {};
      for (int n = 0; n < N; ++n)
        memcpy(last[n], from + n * layout.tile_bytes, static_cast<size_t>(rest * kBlockBytes));
      add<R, N>(x, part, last[0], kMatrixBytes);
    }
    each_sum([](auto i, PartSums& sum) POLYSPEC_INLINE { store_matrix<i>(sum, kMatrixRowBytes); });
  }

  void write(PartSums& sums, int64_t part, int64_t tile) const {
    const int64_t begin = begin_of(part), count = begin_of(part + 1) - begin;
    for (int64_t m = 0; m < count; ++m)
      write_output<BFloat16>(params, sums[m], first + begin + m, tile);
  }

  // All steps and all tokens, which are R parts.
  template <int R, int N>
  void run_tiles(int64_t begin, int64_t end) const {
    alignas(64) PartSums sums[N][R];
    const auto run_some = [&](auto some, int64_t tile) POLYSPEC_INLINE {
      run<R, some>(0, tile, 0, steps, sums[0], R);
      for (int n = 0; n < some; ++n) {
        for (int r = 0; r < R; ++r) write(sums[n][r], r, tile + n);
      }
    };
    for (; begin + N <= end; begin += N) run_some(std::integral_constant<int, N>(), begin);
    for (; begin < end; ++begin) run_some(std::integral_constant<int, 1>(), begin);
  }

  // A run of steps with all tokens, which are many parts.
  template <int N>
  POLYSPEC_FN void run_parts(int64_t tile, int64_t begin, int64_t end,
                             PartSums (*sums)[kMostParts]) const {
    int64_t part = 0;
    for (; part + 2 <= parts; part += 2)
      run<2, N>(part, tile, begin, end, *sums + part, kMostParts);
    if (part < parts) run<1, N>(part, tile, begin, end, *sums + part, kMostParts);
  }
  void run_cached(int64_t begin, int64_t end) const {
    alignas(64) PartSums sums[kTilesCached][kMostParts];
    for (int64_t step = 0; step < steps; step += kStepsCached) {
      const int64_t until = step + kStepsCached < steps ? step + kStepsCached : steps;
      int64_t tile = begin;
      for (; tile + 2 <= end; tile += 2) run_parts<2>(tile, step, until, sums + (tile - begin));
      if (tile < end) run_parts<1>(tile, step, until, sums + (tile - begin));
    }
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int64_t part = 0; part < parts; ++part) write(sums[tile - begin][part], part, tile);
    }
  }
};

void multiply(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  if (with_vectors(params)) return vectors().multiply(params, first, tokens, begin, end);
  const FloatMode mode(FloatMode::kFlushed);
  const DenseLayout layout(params.shape);
  const int64_t parts = parts_of(tokens, kMatrixRows);
  const Pass pass{params, layout, first, tokens, parts, parts_of(layout.blocks, kMatrixRows)};
  const int64_t most = parts_of(tokens, parts);  // tokens of a part
  const Matrices::Shape rows{most, kMatrixRowBytes}, columns{kMatrixRows, kMatrixRowBytes};
  const Matrices set({rows, rows, rows, rows, rows, rows, columns, columns});
  if (parts == 1) return pass.run_tiles<1, 4>(begin, end);
  if (parts == 2) return pass.run_tiles<2, 2>(begin, end);
  for (; begin < end; begin += kTilesCached)
    pass.run_cached(begin, begin + kTilesCached < end ? begin + kTilesCached : end);
}

int64_t parts(int64_t tokens) { return vectors().parts(tokens); }
int64_t at_once(int64_t tokens) { return tokens > 2 * kMatrixRows ? kTilesCached : 4; }

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Dense kDenseAmx = {&POLYSPEC_CORE::parts, &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
                         &POLYSPEC_CORE::at_once, "amx"};

}  // namespace polyspec::cpu
