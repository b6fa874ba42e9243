// The product of a few tokens with 4-bit weights on the tensor cores. Below is the kernel for more
// than 16 tokens, and for fewer where weights cannot be streamed (int4_stream.cuh): devices without
// bulk copies, and activations that leave no room.
//
// A CTA has 32 or 64 outputs and all inputs, in eight slices of whole groups. Weights and
// activations come in chunks of 32 inputs by asynchronous copies, several chunks ahead. Up to 32
// tokens each of its eight warps has a slice, and a lane copies its operands itself, so that the
// loop has no barrier. Of more tokens two warps have 32 each and share a slice, and each copies
// half of its weights: four slices at a time, so that the weights are read once for 64 tokens.
//
// A row of y is summed in this order, with any other rows in the call: inputs of a slice in
// ascending chunks, then the slices, 0 to 3 each after the slice four above was added to it.
#include "core/convert.hpp"
#include "cuda/int4_stream.cuh"
#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

constexpr int kPackThreads = 256;
constexpr int64_t kWideOutputs = 1 << 13;  // from there on CTAs have 64: 128 of them at least
constexpr int64_t kMaxGrid = 0x7fffffff;

// One chunk of a slice: a vector of each lane for each tile of outputs, and of tokens for each of
// `kSharers` warps.
template <int kTiles, int kTokenTiles, int kSharers>
struct Stage {
  Vector weights[kTiles][kWarp];
  Vector x[kSharers][kTokenTiles][kWarp];
};

// With 20 KB of weights or more under way for up to 16 tokens. With sharers as many as fit: 40 KB
// of weights and activations under way.
template <int kTiles, int kTokenTiles, int kSharers>
constexpr int kStages = kSharers > 1                     ? 3
                        : kTiles == 1 && kTokenTiles < 4 ? 6
                                                         : 4;

constexpr int kSums = kWarps / 2;  // a slice and the one four above

// Stages of the slices that are multiplied at the same time, and sums, which reuse their memory
// when all chunks are read. Sums of slices that were multiplied before come first.
template <int kTiles, int kTokenTiles, int kSharers>
struct Int4Shared {
  using Stages = Stage<kTiles, kTokenTiles, kSharers>[kWarps / kSharers]
                                                     [kStages<kTiles, kTokenTiles, kSharers>];
  using Sum = float[kSharers * 2 * kTiles * kTokenTiles][kWarp][4];
  static constexpr size_t kBefore = sizeof(Sum) * (kSums - kSums / kSharers);
  static constexpr size_t kRunning = kBefore + sizeof(Stages), kEnd = sizeof(Sum) * kSums;
  alignas(16) unsigned char bytes[kRunning > kEnd ? kRunning : kEnd];

  __device__ __forceinline__ Stages& stages() {
    return *reinterpret_cast<Stages*>(bytes + kBefore);
  }
  __device__ __forceinline__ Sum& sum(int i) {
    return *reinterpret_cast<Sum*>(bytes + sizeof(Sum) * i);
  }
};

// Adds a warp's sums over a slice, of the upper four, to the sums over the slice four below, or
// vice versa.
template <int kTiles, int kTokenTiles, int kFragments>
__device__ __forceinline__ void add_slice(float (&sum)[kFragments][kWarp][4], bool upper,
                                          int sharer, int lane,
                                          const Sums<kTiles, kTokenTiles>& mine) {
  constexpr int kMine = 2 * kTiles * kTokenTiles;
  const auto at = [&](int f) -> float (&)[4] { return sum[sharer * kMine + f][lane]; };
  if (upper) {
    POLYSPEC_UNROLL
    for (int f = 0; f < kMine; ++f) {
      for (int j = 0; j < 4; ++j) at(f)[j] = mine.of[f / kTokenTiles][f % kTokenTiles][j];
    }
  }
  __syncthreads();  // the upper slices' sums are there
  if (!upper) {
    POLYSPEC_UNROLL
    for (int f = 0; f < kMine; ++f) {
      for (int j = 0; j < 4; ++j) at(f)[j] += mine.of[f / kTokenTiles][f % kTokenTiles][j];
    }
  }
}

// Sums become rows of y, of `tile` on and of token `first` on.
template <class T, int kTiles, int kTokenTiles, int kSharers>
__device__ __forceinline__ void write_sums(Int4Shared<kTiles, kTokenTiles, kSharers>& shared,
                                           const Int4ProductParams& p, int64_t tile,
                                           int64_t first) {
  constexpr int kFragments = kSharers * 2 * kTiles * kTokenTiles;
  POLYSPEC_ROLLED
  for (int at = threadIdx.x; at < kFragments * kWarp; at += kThreads) {
    const int f = at / kWarp, l = at % kWarp;
    const int of_tile = f / kTokenTiles % (2 * kTiles);  // a matrix of 16 outputs
    const int tokens = f / (2 * kTiles * kTokenTiles) * kTokenTiles + f % kTokenTiles;
    POLYSPEC_UNROLL
    for (int j = 0; j < 4; ++j) {
      float sum = shared.sum(0)[f][l][j];
      for (int s = 1; s < kSums; ++s) sum += shared.sum(s)[f][l][j];
      const int64_t output = tile * kTileOutputs + of_tile * 16 + l / 4 + j / 2 * 8;
      const int64_t token = first + tokens * kTokenTile + l % 4 * 2 + j % 2;
      if (token < p.tokens && output < p.shape.outputs)
        core::convert_output(sum, static_cast<T*>(p.y) + token * p.y_stride + output);
    }
  }
}

// Grid: x over blocks of tokens and over tiles of outputs, blocks fastest: they read the same
// weights at the same time, so that memory is asked once.
template <class T, int kTiles, int kTokenTiles, int kSharers>
__global__ void __launch_bounds__(kThreads, (kTiles * kTokenTiles <= 2 ? 2 : 1))
    int4_product_kernel(const __grid_constant__ Int4ProductParams p) {
  begin_kernel();
  constexpr int kTokens = kTokenTiles * kTokenTile;  // of a warp
  constexpr int kAhead = kStages<kTiles, kTokenTiles, kSharers> - 1;
  using Shared = Int4Shared<kTiles, kTokenTiles, kSharers>;
  POLYSPEC_DYNAMIC_SHARED(Shared, shared);
  const Int4Tiles of(p.shape);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, sharer = warp % kSharers;
  const unsigned blocks =
      static_cast<unsigned>((p.tokens + kSharers * kTokens - 1) / (kSharers * kTokens));
  const int64_t tile = int64_t{blockIdx.x / blocks} * kTiles;
  const int64_t first_of_block = int64_t{blockIdx.x % blocks} * kSharers * kTokens;
  const int64_t first = first_of_block + sharer * kTokens;

  // A warp has one slice, or two: 0, 4, 1 and 5 come first, then 2, 6, 3 and 7. Chunks count on
  // from `middle` in the second one.
  const int slice = kSharers == 1 ? warp : warp / 4 + warp % 4 / 2 * 4;
  const auto begin_of = [&](int s) { return static_cast<int>(of.groups * s / kWarps << of.shift); };
  const int begin = begin_of(slice), middle = begin_of(slice + 1);
  const int between = kSharers == 1 ? 0 : begin_of(slice + 2) - middle;
  const int end = kSharers == 1 ? middle : begin_of(slice + 3) - between;
  const auto place_of = [&](int chunk) {
    return kSharers == 1 || chunk < middle ? chunk : chunk + between;
  };

  const unsigned char* const packed = p.packed + tile * of.tile_bytes;
  const auto scales_of = [&](int64_t group, int i) {
    return *reinterpret_cast<const Vector*>(packed + i * of.tile_bytes + of.scales_at(group) +
                                            lane / 4 * core::kVectorBytes);
  };
  const unsigned char* const weights = packed + lane * core::kVectorBytes;
  const T* const x = static_cast<const T*>(p.x) + (first + lane / 4) * p.x_stride + lane % 4 * 8;
  const int left =  // tokens from the first of this lane on
      static_cast<int>(p.tokens - first < kTokens ? p.tokens - first : kTokens) - lane / 4;
  const auto copy = [&](int chunk, Stage<kTiles, kTokenTiles, kSharers>& to) {
    if (chunk < end) {
      const int place = place_of(chunk);
      POLYSPEC_UNROLL
      for (int of_sharer = 0; of_sharer < kTiles / kSharers; ++of_sharer) {
        const int i = of_sharer * kSharers + sharer;
        copy_async(&to.weights[i][lane], weights + i * of.tile_bytes + of.chunk_at(place), 16);
      }
      POLYSPEC_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) {
        const int64_t at = t * kTokenTile * p.x_stride + int64_t{place} * kTileInputs;
        copy_async(&to.x[sharer][t][lane], x + at, t * kTokenTile < left ? 16 : 0);
      }
    }
    end_batch();
  };

  auto& stages = shared.stages()[warp / kSharers];
  POLYSPEC_UNROLL
  for (int i = 0; i < kAhead; ++i) copy(begin + i, stages[i]);
  Vector scales[kTiles] = {};
  for (int i = 0; i < kTiles && begin < end; ++i)
    scales[i] = scales_of(place_of(begin) >> of.shift, i);
  Sums<kTiles, kTokenTiles> y, group;
  float of_x[kTokenTiles][4] = {};
  int stage = 0, chunk = begin;
  POLYSPEC_ROLLED
  for (int turn = 0; turn < kSharers; ++turn) {
    const bool last = turn + 1 == kSharers;
    const int stop = last ? end : middle;
    POLYSPEC_ROLLED
    for (; chunk < stop; ++chunk) {
      wait_for_batches<kAhead - 1>();
      if (kSharers > 1) sync_warps(1 + warp / kSharers, kSharers * kWarp);
      copy(chunk + kAhead, stages[stage == 0 ? kAhead : stage - 1]);  // the one that was read last
      Vector x_of[kTokenTiles], weights_of[kTiles];
      POLYSPEC_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) x_of[t] = stages[stage].x[sharer][t][lane];
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
        for (int i = 0; i < kTiles; ++i) scales[i] = scales_of(place_of(chunk + 1) >> of.shift, i);
      }
    }
    if (last) {
      wait_for_batches<0>();
      __syncthreads();  // all chunks are read
    }
    add_slice(shared.sum((slice + 2 * turn) % kSums), slice >= kSums, sharer, lane, y);
    y = {};
  }
  __syncthreads();  // the lower slices' sums are written
  write_sums<T>(shared, p, tile, first_of_block);
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
  return word;
}

__device__ __forceinline__ uint32_t scale_of(const Int4PackParams& p, int64_t output,
                                             int64_t group) {
  if (output >= p.shape.outputs) return 0;
  const int64_t at = output * (p.shape.inputs / p.shape.group) + group;
  return core::to_bfloat16(p.scales[at]).bits |
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

template <class T, int kTiles, int kTokenTiles, int kSharers = 1>
Result product_in(const Int4ProductParams& p, CUstream_st* stream) {
  constexpr int64_t kOutputs = kTiles * kTileOutputs;
  constexpr int64_t kTokens = kSharers * kTokenTiles * kTokenTile;
  const int64_t tiles = (p.shape.outputs + kOutputs - 1) / kOutputs;
  const int64_t blocks = (p.tokens + kTokens - 1) / kTokens;
  if (blocks > kMaxGrid / tiles) {
    return {Result::Code::kInvalidArgument,
            "tokens, outputs: expected fewer blocks of them than 2^31, given more"};
  }
  constexpr auto kernel = int4_product_kernel<T, kTiles, kTokenTiles, kSharers>;
  constexpr size_t kBytes = sizeof(Int4Shared<kTiles, kTokenTiles, kSharers>);
  const cudaError_t error = allow_dynamic<kernel>(current_device(), int{kBytes});
  if (error != cudaSuccess) return result_of(error);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, p));
}

// Whether it was launched: the device has bulk copies and room for the activations.
template <class T, int kTokenTiles, int kChunks>
bool stream_in(const Int4ProductParams& p, CUstream_st* stream, Result* result) {
  const DeviceShape device = current_device();
  if (!device.clusters) return false;
  const int forced = forced_memory.load(std::memory_order_relaxed);
  const int bytes = forced > 0 ? forced : device.shared_memory;
  const int64_t tiles = Int4Tiles(p.shape).tiles;
  const Int4Plan plan = int4_plan(p.shape, kTokenTiles, bytes,
                                  std::min(forced_ctas.load(std::memory_order_relaxed), kWarps));
  if (plan.stages == 0 || tiles > kMaxGrid / 2) return false;
  static_assert(sizeof(StreamShared<kTokenTiles>) == stream_fixed_bytes(kTokenTiles));
  constexpr auto kernel = int4_stream_kernel<T, kTokenTiles, kChunks>;
  const cudaError_t error = allow_dynamic<kernel>(device, bytes);
  const int ctas = 1 << plan.shift;
  const int64_t at_once = groups_at_once<kernel>(device, ctas, kThreads, bytes);
  if (error != cudaSuccess || at_once == 0) return false;
  const int64_t clusters = std::min(at_once, (tiles + ctas - 1) / ctas);
  const GroupLaunch launch(clusters, ctas, kThreads, stream, bytes);
  *result = result_of(launch_kernel(kernel, launch.config(), p, plan));
  return true;
}

template <class T, int kTokenTiles>
bool stream_of(const Int4ProductParams& p, CUstream_st* stream, Result* result) {
  if (p.shape.group == 128) return stream_in<T, kTokenTiles, 4>(p, stream, result);
  return stream_in<T, kTokenTiles, 0>(p, stream, result);
}

template <class T, int kTiles>
Result product_of(const Int4ProductParams& p, CUstream_st* stream) {
  if (p.tokens <= kTokenTile) return product_in<T, kTiles, 1>(p, stream);
  if (p.tokens <= 2 * kTokenTile) return product_in<T, kTiles, 2>(p, stream);
  if (p.tokens <= 4 * kTokenTile) return product_in<T, kTiles, 4>(p, stream);
  return product_in<T, 2, 4, 2>(p, stream);  // of fewer CTAs each token is read less often
}

template <class T>
Result product_as(const Int4ProductParams& p, CUstream_st* stream) {
  Result result;
  if (p.tokens <= kTokenTile && stream_of<T, 1>(p, stream, &result)) return result;
  if (p.tokens > kTokenTile && p.tokens <= 2 * kTokenTile && stream_of<T, 2>(p, stream, &result))
    return result;
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

Result int4_product(const Int4ProductParams& p, CUstream_st* stream) {
  if (p.dtype == DType::kBFloat16) return product_as<BFloat16>(p, stream);
  return product_as<Float16>(p, stream);
}

}  // namespace polyspec::cuda
