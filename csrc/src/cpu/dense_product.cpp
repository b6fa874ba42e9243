// The dense product, compiled for one instruction set: POLYSPEC_ISA is baseline, avx2, avx512 or
// avx512bf16, and the build passes the matching compiler flags.
//
// An output is one chain of multiply-adds, independent of the instruction set, the number of tokens
// and the neighbouring tiles: the result is always the same. (dense_amx.cpp has another order in
// bfloat16.)
#include "cpu/copy.hpp"
#include "cpu/dense_lanes.hpp"
#include "cpu/dense_output.hpp"
#include "cpu/dense_tables.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/tiles.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

// Bytes of weights that stay in a cache while several parts of the tokens go through them.
constexpr int64_t kCached = 256 << 10;

template <class T>
void prepare_part(const DenseProductParams& params, int64_t token, int64_t count, int32_t* to) {
  constexpr int64_t kInputs = 4 / sizeof(T);
  const int64_t inputs = params.shape.inputs, stride = params.x_stride;
  const T* x = static_cast<const T*>(params.x) + token * stride;
  const auto words = [&](int64_t k, auto bytes) POLYSPEC_INLINE {
    for (int64_t m = 0; m < count; ++m) {
      int32_t word = 0;
      memcpy(&word, x + m * stride + k, bytes);
      for (int step = 0; step < kSteps<T>; ++step) to[step * count + m] = step_word<T>(word, step);
    }
    to += kSteps<T> * count;
  };
  int64_t k = 0;
  for (; k + kInputs <= inputs; k += kInputs) words(k, std::integral_constant<size_t, 4>());
  if (k < inputs) words(k, std::integral_constant<size_t, sizeof(T)>());
}

void prepare(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t part) {
  const int64_t parts = parts_of(tokens, kMostTokens);
  const int64_t begin = part_begin(tokens, parts, part);
  const int64_t count = part_begin(tokens, parts, part + 1) - begin;
  int32_t* to = static_cast<int32_t*>(params.workspace);
  const int64_t words = begin * DenseLayout(params.shape).blocks;  // of one step
  if (params.shape.dtype == DType::kFloat32)
    prepare_part<float>(params, first + begin, count, to + kSteps<float> * words);
  else
    prepare_part<BFloat16>(params, first + begin, count, to + kSteps<BFloat16> * words);
}

template <class T>
struct Pass {
  const DenseProductParams& params;
  DenseLayout layout;
  int64_t first;  // token

  static constexpr int kMostTokens = POLYSPEC_CORE::kMostTokens;
  static constexpr int tiles_at_once(int tokens) { return POLYSPEC_CORE::tiles_at_once(tokens); }

  template <int M, int N>
  void run(int64_t token, int64_t tile) const {
    const uint8_t* from = static_cast<const uint8_t*>(params.packed) + tile * layout.tile_bytes;
    const int32_t* x =
        static_cast<const int32_t*>(params.workspace) + kSteps<T> * token * layout.blocks;
    Sums sums[N][M];
    unrolled<N>([&](auto n) POLYSPEC_INLINE {
      unrolled<M>([&](auto m) POLYSPEC_INLINE { sums[n][m] = no_sums(); });
    });
    for (int64_t block = 0; block < layout.blocks; ++block) {
      unrolled<N>([&](auto n) POLYSPEC_INLINE {
        prefetch(from + n * layout.tile_bytes, N * layout.tile_bytes);
      });
      unrolled<kSteps<T>>([&](auto step) POLYSPEC_INLINE {
        Sums weights[N];
        unrolled<N>([&](auto n) POLYSPEC_INLINE {
          weights[n] = step_weights<T>(from + n * layout.tile_bytes, step);
        });
        unrolled<M>([&](auto m) POLYSPEC_INLINE {
          unrolled<N>([&](auto n) POLYSPEC_INLINE {
            sums[n][m] = add_step<T>(weights[n], x[m], sums[n][m]);
          });
        });
        x += M;
      });
      from += kBlockBytes;
    }
    for (int n = 0; n < N; ++n) {
      for (int m = 0; m < M; ++m) {
        float values[kDenseOutputs];
        store(values, sums[n][m]);
        write_output<T>(params, values, first + token + m, tile + n);
      }
    }
  }
};

int64_t parts(DType, int64_t tokens) { return parts_of(tokens, kMostTokens); }

int64_t at_once(DType dtype, int64_t tokens) {
  return tiles_at_once(static_cast<int>(parts_of(tokens, parts(dtype, tokens))));
}

template <class T>
void multiply_as(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
                 int64_t end) {
  const Pass<T> pass{params, DenseLayout(params.shape), first};
  const int64_t tiles = at_once(params.shape.dtype, tokens);
  const int64_t cached = kCached / (tiles * pass.layout.tile_bytes);
  run_pass(pass, tokens, begin, end, tiles * (cached < 1 ? 1 : cached));
}

void multiply(const DenseProductParams& params, int64_t first, int64_t tokens, int64_t begin,
              int64_t end) {
  const FloatMode mode(FloatMode::kFlushed);
  if (params.shape.dtype == DType::kFloat32)
    multiply_as<float>(params, first, tokens, begin, end);
  else
    multiply_as<BFloat16>(params, first, tokens, begin, end);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Dense POLYSPEC_COPY(kDense) = {&POLYSPEC_CORE::parts, &POLYSPEC_CORE::prepare,
                                     &POLYSPEC_CORE::multiply, &POLYSPEC_CORE::at_once,
                                     POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
