// The product of a few tokens with 4-bit weights on the tensor cores. Below is the kernel for more
// than 64 tokens, and for fewer where weights cannot be streamed (int4_stream.cuh): devices without
// bulk copies, and activations that leave no room.
//
// A CTA has up to 32 tokens, 32 or 64 outputs and all inputs, in eight slices of whole groups, one
// for each warp. Weights and activations come in chunks of 32 inputs by asynchronous copies,
// several chunks ahead. A lane copies its operands itself, so that the loop has no barrier.
//
// A row of y is summed in this order, with any other rows in the call: inputs of a slice in
// ascending chunks, then the slices, 0 to 3 each after the slice four above was added to it.
#include "core/convert.hpp"
#include "cuda/int4_stream.cuh"
#include "cuda/launch.cuh"
#include "cuda/layer.hpp"

namespace polyspec::cuda {
namespace {

constexpr int kPackThreads = 256;
constexpr int64_t kWideOutputs = 1 << 13;  // from there on CTAs have 64: 128 of them at least
constexpr int64_t kMaxGrid = 0x7fffffff;
constexpr int64_t kStreamTokens = 32;

// One chunk of a slice: a vector of each lane for each tile of outputs, and of tokens.
template <int kTiles, int kTokenTiles>
struct Stage {
  Vector weights[kTiles][kWarp];
  Vector x[kTokenTiles][kWarp];
};

// With 20 KB of weights or more under way for up to 16 tokens.
template <int kTiles, int kTokenTiles>
constexpr int kStages = kTiles == 1 && kTokenTiles < 4 ? 6 : 4;

constexpr int kSums = kWarps / 2;  // a slice and the one four above

// Sums reuse the stages' memory when all chunks are read.
template <int kTiles, int kTokenTiles>
union Int4Shared {
  Stage<kTiles, kTokenTiles> stages[kWarps][kStages<kTiles, kTokenTiles>];
  float sums[kSums][2 * kTiles * kTokenTiles][kWarp][4];
};

// Adds a warp's sums over a slice, of the upper four, to the sums over the slice four below, or
// vice versa.
template <int kTiles, int kTokenTiles, int kFragments>
__device__ __forceinline__ void add_slice(float (&sum)[kFragments][kWarp][4], bool upper, int lane,
                                          const Sums<kTiles, kTokenTiles>& mine) {
  if (upper) {
    POLYSPEC_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      for (int j = 0; j < 4; ++j) sum[f][lane][j] = mine.of[f / kTokenTiles][f % kTokenTiles][j];
    }
  }
  __syncthreads();  // the upper slices' sums are there
  if (!upper) {
    POLYSPEC_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      for (int j = 0; j < 4; ++j) sum[f][lane][j] += mine.of[f / kTokenTiles][f % kTokenTiles][j];
    }
  }
}

// Sums become rows of y, of `tile` on and of token `first` on. Of a gated product the second tile
// has the ups of the first one's gates.
template <class T, int kTiles, int kTokenTiles, bool kGated>
__device__ __forceinline__ void write_sums(const Int4Shared<kTiles, kTokenTiles>& shared,
                                           const Int4Product& p, int64_t tile, int64_t first) {
  constexpr int kFragments = 2 * kTiles * kTokenTiles;
  constexpr int kWritten = kGated ? kFragments / 2 : kFragments;
  const int64_t outputs = kGated ? p.shape.outputs / 2 : p.shape.outputs;
  const auto sum_of = [&](int f, int l, int j) {
    float sum = shared.sums[0][f][l][j];
    POLYSPEC_UNROLL
    for (int s = 1; s < kSums; ++s) sum += shared.sums[s][f][l][j];
    return sum;
  };
  POLYSPEC_ROLLED
  for (int at = threadIdx.x; at < kWritten * kWarp * 4; at += kThreads) {
    const int j = at % 4, l = at / 4 % kWarp, f = at / (4 * kWarp);
    float sum = sum_of(f, l, j);
    if constexpr (kGated) {
      const float up = sum_of(f + kWritten, l, j);
      sum = core::gated_value<T>(core::rounded<T>(sum), core::rounded<T>(up));
    }
    const int64_t output = tile * kTileOutputs + f / kTokenTiles * 16 + l / 4 + j / 2 * 8;
    const int64_t token = first + f % kTokenTiles * kTokenTile + l % 4 * 2 + j % 2;
    if (token < p.tokens && output < outputs) write_output<T>(p, token, output, sum);
  }
}

// Grid: x over blocks of tokens and over tiles of outputs, blocks fastest: they read the same
// weights at the same time, so that memory is asked once.
template <class T, int kTiles, int kTokenTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, (kTiles * kTokenTiles <= 2 ? 2 : 1))
    int4_product_kernel(const __grid_constant__ Int4Product p) {
  begin_kernel();
  constexpr int kTokens = kTokenTiles * kTokenTile;
  constexpr int kAhead = kStages<kTiles, kTokenTiles> - 1;
  using Shared = Int4Shared<kTiles, kTokenTiles>;
  POLYSPEC_DYNAMIC_SHARED(Shared, shared);
  const Int4Tiles of(p.shape);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned blocks = static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens);
  const int64_t tile = int64_t{blockIdx.x / blocks} * (kGated ? 1 : kTiles);
  const int64_t next_tile = kGated ? of.tiles / 2 * of.tile_bytes : of.tile_bytes;
  const int64_t first = int64_t{blockIdx.x % blocks} * kTokens;

  const auto begin_of = [&](int s) { return static_cast<int>(of.groups * s / kWarps << of.shift); };
  const int begin = begin_of(warp), end = begin_of(warp + 1);

  const unsigned char* const packed = p.packed + tile * of.tile_bytes;
  const auto scales_of = [&](int64_t group, int i) {
    return *reinterpret_cast<const Vector*>(packed + i * next_tile + of.scales_at(group) +
                                            lane / 4 * core::kVectorBytes);
  };
  const unsigned char* const weights = packed + lane * core::kVectorBytes;
  const T* const x = static_cast<const T*>(p.x) + (first + lane / 4) * p.x_stride + lane % 4 * 8;
  const int left =  // tokens from the first of this lane on
      static_cast<int>(p.tokens - first < kTokens ? p.tokens - first : kTokens) - lane / 4;
  const auto copy = [&](int chunk, Stage<kTiles, kTokenTiles>& to) {
    if (chunk < end) {
      POLYSPEC_UNROLL
      for (int i = 0; i < kTiles; ++i)
        copy_async(&to.weights[i][lane], weights + i * next_tile + of.chunk_at(chunk), 16);
      POLYSPEC_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) {
        const int64_t at = t * kTokenTile * p.x_stride + int64_t{chunk} * kTileInputs;
        copy_async(&to.x[t][lane], x + at, t * kTokenTile < left ? 16 : 0);
      }
    }
    end_batch();
  };

  auto& stages = shared.stages[warp];
  POLYSPEC_UNROLL
  for (int i = 0; i < kAhead; ++i) copy(begin + i, stages[i]);
  Vector scales[kTiles] = {};
  for (int i = 0; i < kTiles && begin < end; ++i) scales[i] = scales_of(begin >> of.shift, i);
  Sums<kTiles, kTokenTiles> y, group;
  float of_x[kTokenTiles][4] = {};
  int stage = 0;
  POLYSPEC_ROLLED
  for (int chunk = begin; chunk < end; ++chunk) {
    wait_for_batches<kAhead - 1>();
    copy(chunk + kAhead, stages[stage == 0 ? kAhead : stage - 1]);  // the one that was read last
    Vector x_of[kTokenTiles], weights_of[kTiles];
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) x_of[t] = stages[stage].x[t][lane];
    POLYSPEC_UNROLL
    for (int i = 0; i < kTiles; ++i) weights_of[i] = stages[stage].weights[i][lane];
    add_chunk<T>(x_of, of_x);
    multiply_chunk<T>(weights_of, x_of, group);
    stage = stage == kAhead ? 0 : stage + 1;
    if (((chunk + 1) & ((1 << of.shift) - 1)) != 0) continue;
    add_group(y, group, of_x, scales);
    group = {};
    POLYSPEC_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      for (int j = 0; j < 4; ++j) of_x[t][j] = 0.0f;
    }
    if (chunk + 1 < end) {  // in time for the end of the next group
      POLYSPEC_UNROLL
      for (int i = 0; i < kTiles; ++i) scales[i] = scales_of((chunk + 1) >> of.shift, i);
    }
  }
  wait_for_batches<0>();
  __syncthreads();  // all chunks are read
  add_slice(shared.sums[warp % kSums], warp >= kSums, lane, y);
  __syncthreads();  // the lower slices' sums are written
  write_sums<T, kTiles, kTokenTiles, kGated>(shared, p, tile, first);
}

// Four numbers of a word's halves: outputs g and g + 8, inputs k and k + 1, then k + 2 and k + 3.
__device__ __forceinline__ uint32_t word_of(const Int4PackParams& p, int64_t output, int64_t k) {
  uint32_t word = 0;
  POLYSPEC_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int64_t row = output + i % 2 * 8;
    if (row >= p.shape.outputs) continue;
    const uint32_t value = p.values[row * p.shape.inputs + k + i / 4 + i % 4 / 2 * 2];
    word |= (value & 15) << (i % 4 * 4 + i / 4 * 16);
  }
  return word << core::kWordLeft | word >> (32 - core::kWordLeft);
}

__device__ __forceinline__ uint32_t scale_of(const Int4PackParams& p, int64_t output,
                                             int64_t group) {
  if (output >= p.shape.outputs) return 0;
  const int64_t at = output * (p.shape.inputs / p.shape.group) + group;
  // Exact in bfloat16: the lower half is zero.
  const float scale = 16.0f * core::to_float(core::to_bfloat16(p.scales[at]));
  return core::bit_cast<uint32_t>(scale) >> 16 |
         static_cast<uint32_t>(core::to_bfloat16(p.zeros[at]).bits) << 16;
}

// A thread writes 16 bytes. Grid: x over the threads of a tile, y over tiles.
__global__ void __launch_bounds__(kPackThreads)
    int4_pack_kernel(const __grid_constant__ Int4PackParams p) {
  begin_kernel();
  const Int4Tiles of(p.shape);
  const int64_t vector = blockIdx.x * int64_t{kPackThreads} + threadIdx.x;
  const int64_t group = vector / of.group_vectors, at = vector % of.group_vectors;
  if (group >= of.groups) return;
  for (int64_t tile = blockIdx.y; tile < of.tiles; tile += gridDim.y) {
    Vector packed;
    if (at < core::kScaleVectors) {
      POLYSPEC_UNROLL
      for (int i = 0; i < 4; ++i)
        packed.words[i] = scale_of(p, tile * kTileOutputs + at + 8 * i, group);
    } else {
      const int64_t chunk = (at - core::kScaleVectors) / kWarp;
      const int64_t lane = (at - core::kScaleVectors) % kWarp;
      const int64_t k = group * p.shape.group + chunk * kTileInputs + lane % 4 * 8;
      POLYSPEC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int64_t output = tile * kTileOutputs + i / 2 * 16 + lane / 4;
        packed.words[i] = word_of(p, output, k + i % 2 * 4);
      }
    }
    *reinterpret_cast<Vector*>(p.packed + tile * of.tile_bytes + vector * core::kVectorBytes) =
        packed;
  }
}

template <class T, int kTiles, int kTokenTiles, bool kGated>
Result product_in(const Int4Product& p, CUstream_st* stream) {
  constexpr int64_t kOutputs = kTiles * kTileOutputs;
  constexpr int64_t kTokens = kTokenTiles * kTokenTile;
  const int64_t tiles = (p.shape.outputs + kOutputs - 1) / kOutputs;
  const int64_t blocks = (p.tokens + kTokens - 1) / kTokens;
  if (blocks > kMaxGrid / tiles) {
    return {Result::Code::kInvalidArgument,
            "tokens, outputs: expected fewer blocks of them than 2^31, given more"};
  }
  constexpr auto kernel = int4_product_kernel<T, kTiles, kTokenTiles, kGated>;
  constexpr size_t kBytes = sizeof(Int4Shared<kTiles, kTokenTiles>);
  const cudaError_t error = allow_dynamic<kernel>(current_device(), int{kBytes});
  if (error != cudaSuccess) return result_of(error);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, p));
}

// Launches the norm, if there is one, by itself.
Result norm_first(Int4Product* p, CUstream_st* stream) {
  if (p->norm == nullptr) return {};
  RmsNormParams norm;
  norm.tokens = p->tokens;
  norm.width = p->shape.inputs;
  norm.dtype = p->dtype;
  norm.epsilon = p->epsilon;
  norm.x = p->x;
  norm.weight = p->norm;
  norm.y = p->normed;
  p->x = p->normed;
  p->norm = nullptr;
  return rms_norm(norm, stream);
}

// About as many clusters, with a multiple of half a head's tiles as CTAs.
int64_t whole_halves(int64_t clusters, int64_t half_tiles, int ctas) {
  const int64_t least = std::max<int64_t>(half_tiles / ctas, 1);  // (both are powers of two)
  return std::max(clusters / least, int64_t{1}) * least;
}

// Whether the halves of a head are whole tiles, a power of two, which CTAs turn.
bool turns_in_product(const Int4Product& p) {
  const RotaryParams& turn = p.append.turn;
  const int64_t halves = p.half_tiles();
  return turn.query_norm == nullptr && turn.width % (2 * kTileOutputs) == 0 &&
         (halves & (halves - 1)) == 0;
}

// Whether it was launched: the device has bulk copies and room for the activations.
template <class T, int kTokenTiles, int kChunks>
bool stream_in(Int4Product p, CUstream_st* stream, Result* result) {
  const DeviceShape device = current_device();
  if (!device.clusters) return false;
  const int forced = forced_memory.load(std::memory_order_relaxed);
  const int bytes = forced > 0 ? forced : device.shared_memory;
  const Int4Tiles of(p.shape);
  const int64_t tiles = of.tiles / (p.gated || p.turns ? 2 : 1);
  const Int4Plan plan = int4_plan(p.shape, kTokenTiles, bytes,
                                  std::min(forced_ctas.load(std::memory_order_relaxed), kWarps));
  // (The kernel counts vectors, of several tiles, in 32 bits.)
  if (plan.stages == 0 || of.tiles * of.tile_bytes > kMaxGrid) return false;
  static_assert(sizeof(StreamShared<kTokenTiles>) == stream_fixed_bytes(kTokenTiles));
  constexpr auto kernel = int4_stream_kernel<T, kTokenTiles, kChunks>;
  const cudaError_t error = allow_dynamic<kernel>(device, bytes);
  const int ctas = 1 << plan.shift;
  const int64_t at_once = groups_at_once<kernel>(device, ctas, kThreads, bytes);
  if (error != cudaSuccess || at_once == 0) return false;
  const int groups = forced_groups.load(std::memory_order_relaxed);
  int64_t clusters = std::min(groups > 0 ? std::min<int64_t>(groups, at_once) : at_once,
                              (tiles + ctas - 1) / ctas);
  // Then the second half of a head is as far away in every turn.
  if (p.turns) clusters = whole_halves(clusters, p.half_tiles(), ctas);
  if (ctas > 1) *result = norm_first(&p, stream);  // a CTA has no whole rows
  if (!result->ok()) return true;
  const GroupLaunch launch(clusters, ctas, kThreads, stream, bytes);
  *result = result_of(launch_kernel(kernel, launch.config(), p, plan));
  return true;
}

template <class T, int kTokenTiles>
bool stream_of(const Int4Product& p, CUstream_st* stream, Result* result) {
  if (p.shape.group == 128) return stream_in<T, kTokenTiles, 4>(p, stream, result);
  if constexpr (kTokenTiles < 4) return stream_in<T, kTokenTiles, 0>(p, stream, result);
  return false;
}

// Up to 32 tokens by each launch: the second launch finds many of the weights in L2.
template <class T>
bool streamed(Int4Product p, CUstream_st* stream, Result* result) {
  if (p.tokens > 2 * kStreamTokens) return false;
  if (p.turns && (p.tokens > kStreamTokens || !turns_in_product(p))) return false;
  for (int64_t left = p.tokens; left > 0; left -= p.tokens) {
    p.tokens = std::min(left, kStreamTokens);
    const auto launch = p.tokens <= kTokenTile       ? stream_of<T, 1>
                        : p.tokens <= 2 * kTokenTile ? stream_of<T, 2>
                                                     : stream_of<T, kStreamTokens / kTokenTile>;
    if (!launch(p, stream, result)) return false;
    if (!result->ok()) return true;
    p.x = static_cast<const T*>(p.x) + p.tokens * p.x_stride;
    p.y = static_cast<T*>(p.y) + p.tokens * p.y_stride;
    if (p.residual != nullptr)
      p.residual = static_cast<const T*>(p.residual) + p.tokens * p.y_stride;
  }
  return true;
}

template <class T, int kTiles, bool kGated = false>
Result product_of(const Int4Product& p, CUstream_st* stream) {
  if (p.tokens <= kTokenTile) return product_in<T, kTiles, 1, kGated>(p, stream);
  if (p.tokens <= 2 * kTokenTile) return product_in<T, kTiles, 2, kGated>(p, stream);
  return product_in<T, kTiles, 4, kGated>(p, stream);
}

template <class T>
Result product_as(Int4Product p, CUstream_st* stream) {
  Result result;
  if (p.tokens > kNormTokens) result = norm_first(&p, stream);
  if (!result.ok() || streamed<T>(p, stream, &result)) return result;
  if (p.turns) {
    p.turns = false;
    result = product_as<T>(p, stream);
    return result.ok() ? rotary_append(p.append, stream) : result;
  }
  result = norm_first(&p, stream);
  if (!result.ok()) return result;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (p.gated) return product_of<T, 2, true>(p, stream);
  }
  if (p.shape.outputs < kWideOutputs) return product_of<T, 1>(p, stream);
  return product_of<T, 2>(p, stream);
}

}  // namespace

Result int4_pack(const Int4PackParams& p, CUstream_st* stream) {
  const Int4Tiles of(p.shape);
  const int64_t vectors = of.groups * of.group_vectors;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((vectors + kPackThreads - 1) / kPackThreads),
                        static_cast<unsigned>(of.tiles < 65535 ? of.tiles : 65535));
  config.blockDim = dim3(kPackThreads);
  config.stream = stream;
  return result_of(launch_kernel(int4_pack_kernel, config, p));
}

Result int4_product(const Int4Product& p, CUstream_st* stream) {
  if (p.dtype == DType::kBFloat16) return product_as<BFloat16>(p, stream);
  return product_as<Float16>(p, stream);
}

}  // namespace polyspec::cuda
