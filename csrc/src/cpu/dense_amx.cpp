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

// Bytes of weights that stay in a cache while several parts of the tokens go through them.
constexpr int64_t kCached = 512 << 10;

// The workspace of a pass of m tokens: activations [steps, m, 32], zeros behind the last inputs.
void prepare(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t part) {
  if (with_vectors(params)) return vectors().prepare(params, first, tokens, part);
  const int64_t parts = vectors().parts(tokens), inputs = params.shape.inputs;
  const BFloat16* x = static_cast<const BFloat16*>(params.x);
  char* const to = static_cast<char*>(params.workspace);
  for (int64_t m = part_begin(tokens, parts, part); m < part_begin(tokens, parts, part + 1); ++m) {
    const BFloat16* const row = x + (first + m) * params.x_stride;
    for (int64_t k = 0, step = 0; k < inputs; k += kStepInputs, ++step) {
      char* const at = to + (step * tokens + m) * kMatrixRowBytes;
      if (k + kStepInputs <= inputs) {
        memcpy(at, row + k, kMatrixRowBytes);
      } else {
        memset(at, 0, kMatrixRowBytes);
        memcpy(at, row + k, static_cast<size_t>(inputs - k) * sizeof(BFloat16));
      }
    }
  }
}

// `tokens` of them from `first` on.
struct Pass {
  const DenseProductParams& params;
  DenseLayout layout;
  int64_t first, tokens, parts;

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

  // R parts of the tokens from `part` on with N tiles of outputs from `tile` on. Registers 0 to 3
  // hold sums, 4 and 5 activations, 6 and 7 weights.
  template <int R, int N>
  void run(int64_t part, int64_t tile) const {
    static_assert(R <= 2 && R * N <= 4, "registers");
    const char* x = static_cast<const char*>(params.workspace);
    const uint8_t* from = static_cast<const uint8_t*>(params.packed) + tile * layout.tile_bytes;
    unrolled<R * N>([&](auto i) POLYSPEC_INLINE { clear_matrix<i>(); });
    int64_t rest = layout.blocks;
    for (; rest >= kMatrixRows; rest -= kMatrixRows) {
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        for (int64_t row = 0; row < kMatrixRows; ++row)
          prefetch(from + n * layout.tile_bytes + row * kBlockBytes, N * layout.tile_bytes);
      });
      add<R, N>(x, part, from, layout.tile_bytes);
      x += tokens * kMatrixRowBytes;
      from += kMatrixBytes;
    }
    if (rest > 0) {
      alignas(64) uint8_t last[N][kMatrixBytes] = {};
      for (int n = 0; n < N; ++n)
        memcpy(last[n], from + n * layout.tile_bytes, static_cast<size_t>(rest * kBlockBytes));
      add<R, N>(x, part, last[0], kMatrixBytes);
    }
    alignas(64) float sums[R * N][kMatrixRows][kDenseOutputs];
    unrolled<R * N>([&](auto i) POLYSPEC_INLINE { store_matrix<i>(sums[i], kMatrixRowBytes); });
    for (int r = 0; r < R; ++r) {
      const int64_t begin = begin_of(part + r), count = begin_of(part + r + 1) - begin;
      for (int64_t m = 0; m < count; ++m) {
        for (int n = 0; n < N; ++n)
          write_output<BFloat16>(params, sums[r * N + n][m], first + begin + m, tile + n);
      }
    }
  }

  template <int R, int N>
  void run_tiles(int64_t part, int64_t begin, int64_t end) const {
    for (; begin + N <= end; begin += N) run<R, N>(part, begin);
    for (; begin < end; ++begin) run<R, 1>(part, begin);
  }
};

void multiply(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  if (with_vectors(params)) return vectors().multiply(params, first, tokens, begin, end);
  const FloatMode mode(FloatMode::kFlushed);
  const Pass pass{params, DenseLayout(params.shape), first, tokens, parts_of(tokens, kMatrixRows)};
  const int64_t most = (tokens + pass.parts - 1) / pass.parts;  // tokens of a part
  const Matrices::Shape rows{most, kMatrixRowBytes}, columns{kMatrixRows, kMatrixRowBytes};
  const Matrices set({rows, rows, rows, rows, rows, rows, columns, columns});
  if (pass.parts == 1) return pass.run_tiles<1, 4>(0, begin, end);
  const int64_t cached = 2 * (1 + kCached / (2 * pass.layout.tile_bytes));
  for (; begin < end; begin += cached) {
    const int64_t cut = begin + cached < end ? begin + cached : end;
    int64_t part = 0;
    for (; part + 2 <= pass.parts; part += 2) pass.run_tiles<2, 2>(part, begin, cut);
    if (part < pass.parts) pass.run_tiles<1, 4>(part, begin, cut);
  }
}

int64_t parts(int64_t tokens) { return vectors().parts(tokens); }
int64_t at_once(int64_t) { return 4; }

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Dense kDenseAmx = {&POLYSPEC_CORE::parts, &POLYSPEC_CORE::prepare, &POLYSPEC_CORE::multiply,
                         &POLYSPEC_CORE::at_once, "amx"};

}  // namespace polyspec::cpu
