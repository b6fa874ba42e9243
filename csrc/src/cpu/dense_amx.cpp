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
bool with_vectors(DType dtype) { return dtype == DType::kFloat32; }

// Inputs of a product of tiles.
constexpr int64_t kStepInputs = kMatrixRowBytes / 2;

// Of many tokens: tiles that go through a run of steps while the second cache holds the activations
// of all tokens for these steps; and within it steps of two tiles with weights that the first cache
// holds, together with the sums of a group of parts.
constexpr int64_t kTilesCached = 8, kStepsCached = 64;
constexpr int64_t kGroupSteps = 8, kGroupParts = 8;
constexpr int64_t kMostParts = kDenseTokens / kMatrixRows;

// Of a part of the tokens and a tile of outputs.
using PartSums = float[kMatrixRows][kDenseOutputs];

// The workspace of a pass: of each part of the tokens its activations, [steps, tokens of the part,
// 32], zeros after the last inputs.
char* activations(const DenseProductParams& params, int64_t steps, int64_t tokens) {
  return static_cast<char*>(params.workspace) + steps * tokens * kMatrixRowBytes;
}

void prepare(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t part) {
  if (with_vectors(params.shape.dtype)) return vectors().prepare(params, first, tokens, part);
  const int64_t parts = parts_of(tokens, kMatrixRows), inputs = params.shape.inputs;
  const int64_t steps = parts_of(inputs, kStepInputs);
  const int64_t begin = part_begin(tokens, parts, part), end = part_begin(tokens, parts, part + 1);
  const BFloat16* const x = static_cast<const BFloat16*>(params.x) + first * params.x_stride;
  char* to = activations(params, steps, begin);
  // Rows within steps: a row's steps lie far apart.
  for (int64_t k = 0; k < inputs; k += kStepInputs) {
    const int64_t count = k + kStepInputs < inputs ? kStepInputs : inputs - k;
    for (int64_t m = begin; m < end; ++m, to += kMatrixRowBytes) {
      const BFloat16* const from = x + m * params.x_stride + k;
      if (count == kStepInputs) {
        memcpy(to, from, kMatrixRowBytes);
      } else {
        memset(to, 0, kMatrixRowBytes);
        memcpy(to, from, static_cast<size_t>(count) * sizeof(BFloat16));
      }
    }
  }
}

// `tokens` of them from `first` on.
struct Pass {
  const DenseProductParams& params;
  DenseLayout layout;
  int64_t first, tokens, parts, steps;

  // First tokens of the parts, and the end of the last. The last part is one of the largest, so
  // that no register is loaded from beyond it.
  int64_t begins[kMostParts + 1];

  Pass(const DenseProductParams& params, int64_t first, int64_t tokens)
      : params(params),
        layout(params.shape),
        first(first),
        tokens(tokens),
        parts(parts_of(tokens, kMatrixRows)),
        steps(parts_of(layout.blocks, kMatrixRows)) {
    for (int64_t part = 0; part <= parts; ++part) begins[part] = part_begin(tokens, parts, part);
  }

  int64_t rows_of(int64_t part) const { return begins[part + 1] - begins[part]; }
  const uint8_t* weights_at(int64_t tile, int64_t step) const {
    return static_cast<const uint8_t*>(params.packed) + tile * layout.tile_bytes +
           step * kMatrixBytes;
  }

  // The products of a step's activations and weights.
  template <int R, int N>
  POLYSPEC_FN static void add(const char* const (&x)[R], const uint8_t* weights,
                              int64_t tile_bytes) {
    unrolled<R>([&](auto r) POLYSPEC_INLINE { load_matrix<4 + r>(x[r], kMatrixRowBytes); });
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      load_matrix<6 + n % 2>(weights + n * tile_bytes, kMatrixRowBytes);
      unrolled<R>([&](auto r)
                      POLYSPEC_INLINE { add_bfloat16_products<r * N + n, 4 + r, 6 + n % 2>(); });
    });
  }

  // Steps [begin, end) of R parts of the tokens from `part` on with N tiles of outputs from `tile`
  // on. sums[n * stride + r] holds the sums of the steps before, and then of these. Registers 0 to
  // 3 hold sums, 4 and 5 activations, 6 and 7 weights. `ask`, called before each step with the
  // address of its weights, prefetches.
  template <int R, int N, class Ask>
  POLYSPEC_FN void run(int64_t part, int64_t tile, int64_t begin, int64_t end, PartSums* sums,
                       int64_t stride, const Ask& ask) const {
    static_assert(R <= 2 && R * N <= 4, "registers");
    const uint8_t* from = weights_at(tile, begin);
    const char* x[R];
    int64_t x_bytes[R];
    for (int r = 0; r < R; ++r) {
      x_bytes[r] = rows_of(part + r) * kMatrixRowBytes;
      x[r] = activations(params, steps, begins[part + r]) + begin * x_bytes[r];
    }
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
      ask(from);
      add<R, N>(x, from, layout.tile_bytes);
      for (int r = 0; r < R; ++r) x[r] += x_bytes[r];
      from += kMatrixBytes;
    }
    if (whole < end) {
      const int64_t rest = layout.blocks - whole * kMatrixRows;
      alignas(64) uint8_t last[N][kMatrixBytes] = {};
      for (int n = 0; n < N; ++n)
        memcpy(last[n], from + n * layout.tile_bytes, static_cast<size_t>(rest * kBlockBytes));
      add<R, N>(x, last[0], kMatrixBytes);
    }
    each_sum([](auto i, PartSums& sum) POLYSPEC_INLINE { store_matrix<i>(sum, kMatrixRowBytes); });
  }

  // sums[n * stride], of N tiles.
  template <int N>
  POLYSPEC_FN void write(PartSums* sums, int64_t stride, int64_t part, int64_t tile) const {
    const int64_t begin = first + begins[part], count = rows_of(part);
    for (int64_t m = 0; m < count; ++m) {
      for (int n = 0; n < N; ++n)
        write_output<BFloat16>(params, sums[n * stride][m], begin + m, tile + n);
    }
  }

  // All steps and all tokens, which are R parts.
  template <int R, int N>
  void run_tiles(int64_t begin, int64_t end) const {
    alignas(64) PartSums sums[N][R];
    const auto run_some = [&](auto some, int64_t tile) POLYSPEC_INLINE {
      run<R, some>(0, tile, 0, steps, sums[0], R, [&](const uint8_t* from) POLYSPEC_INLINE {
        for (int n = 0; n < some; ++n) {
          for (int64_t row = 0; row < kMatrixRows; ++row)
            prefetch(from + n * layout.tile_bytes + row * kBlockBytes, N * layout.tile_bytes);
        }
      });
      for (int r = 0; r < R; ++r) write<some>(sums[0] + r, R, r, tile);
    };
    for (; begin + N <= end; begin += N) run_some(std::integral_constant<int, N>(), begin);
    for (; begin < end; ++begin) run_some(std::integral_constant<int, 1>(), begin);
  }

  // Steps [begin, end) of N tiles with all tokens, which are many parts. Line by line between the
  // products it prefetches the weights of the next call, from `next` on.
  template <int N>
  POLYSPEC_FN void run_parts(int64_t tile, int64_t begin, int64_t end, const uint8_t* next,
                             PartSums (*sums)[kMostParts]) const {
    const int64_t each = (2 * kMatrixRows + parts - 1) / parts;  // lines for each step
    const auto ask = [&](const uint8_t*) POLYSPEC_INLINE {
      for (int64_t row = 0; row < each; ++row, next += kMatrixRowBytes) {
        for (int n = 0; n < N; ++n) __builtin_prefetch(next + n * layout.tile_bytes, 0, 2);
      }
    };
    for (int64_t group = 0; group < parts; group += kGroupParts) {
      const int64_t last = group + kGroupParts < parts ? group + kGroupParts : parts;
      for (int64_t step = begin; step < end; step += kGroupSteps) {
        const int64_t until = step + kGroupSteps < end ? step + kGroupSteps : end;
        int64_t part = group;
        for (; part + 2 <= last; part += 2)
          run<2, N>(part, tile, step, until, *sums + part, kMostParts, ask);
        if (part < last) run<1, N>(part, tile, step, until, *sums + part, kMostParts, ask);
      }
      if (end < steps) continue;
      for (int64_t part = group; part < last; ++part)
        write<N>(*sums + part, kMostParts, part, tile);
    }
  }
  void run_cached(int64_t begin, int64_t end) const {
    alignas(64) PartSums sums[kTilesCached][kMostParts];
    for (int64_t step = 0; step < steps; step += kStepsCached) {
      const int64_t until = step + kStepsCached < steps ? step + kStepsCached : steps;
      for (int64_t tile = begin; tile < end; tile += 2) {
        const uint8_t* const next = tile + 2 < end  ? weights_at(tile + 2, step)
                                    : until < steps ? weights_at(begin, until)
                                                    : weights_at(end, 0);
        if (tile + 2 <= end) {
          run_parts<2>(tile, step, until, next, sums + (tile - begin));
        } else {
          run_parts<1>(tile, step, until, next, sums + (tile - begin));
        }
      }
    }
  }
};

void multiply(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  if (with_vectors(params.shape.dtype))
    return vectors().multiply(params, first, tokens, begin, end);
  const FloatMode mode(FloatMode::kFlushed);
  const Pass pass(params, first, tokens);
  const int64_t parts = pass.parts, most = parts_of(tokens, parts);  // tokens of a part
  const Matrices::Shape rows{most, kMatrixRowBytes}, columns{kMatrixRows, kMatrixRowBytes};
  const Matrices set({rows, rows, rows, rows, rows, rows, columns, columns});
  if (parts == 1) return pass.run_tiles<1, 4>(begin, end);
  if (parts == 2) return pass.run_tiles<2, 2>(begin, end);
  for (; begin < end; begin += kTilesCached)
    pass.run_cached(begin, begin + kTilesCached < end ? begin + kTilesCached : end);
}

int64_t parts(DType dtype, int64_t tokens) {
  return with_vectors(dtype) ? vectors().parts(dtype, tokens) : parts_of(tokens, kMatrixRows);
}
int64_t at_once(DType dtype, int64_t tokens) {
  if (with_vectors(dtype)) return vectors().tiles_at_once(dtype, tokens);
  return tokens > 2 * kMatrixRows ? kTilesCached : 4;
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Dense kDenseAmx = {&POLYSPEC_CORE::parts, &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
                         &POLYSPEC_CORE::at_once, "amx"};

}  // namespace polyspec::cpu
