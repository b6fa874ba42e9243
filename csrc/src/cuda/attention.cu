// Attention of a few queries over a cache on CUDA, with the sums of cpu/attention.cpp in the same
// order: a CTA has up to eight queries that read the keys of one group, and a span of these keys.
// Where there are several spans, a second launch merges them in order.
//
// Keys and values pass through shared memory in tiles, 256 bytes of 128 of them, copied two tiles
// ahead: with few queries a CTA waits for memory more than it computes. A thread has the sums of
// one key, and of two elements of values. Everything is fused multiply-adds.
#include "core/kv_index.hpp"
#include "core/layer_math.hpp"
#include "cuda/attention.hpp"
#include "cuda/launch.cuh"
#include "cuda/tensor_core.cuh"

namespace polyspec::cuda {
namespace {

using core::BFloat16;
using core::kSumLanes;
using core::Lane16;
using core::to_float;

constexpr int kThreads = 256, kWarp = 32;
constexpr int kQueries = kThreads / kWarp;  // of a CTA: a warp weighs the keys of each
constexpr int kKeys = core::kAttentionKeys;
constexpr int kHalves = kThreads / kKeys;  // of the queries; threads divide their scores
constexpr int kVectors = 16;               // of 16 bytes, of a key in a tile
constexpr int kRowBytes = 16 * kVectors;
constexpr int kPitch = kRowBytes + 16;    // so that eight keys lie in different banks
constexpr int kOwn = kQueries / kHalves;  // queries of a thread, at most
constexpr int kLoads = kKeys * kVectors / kThreads;
constexpr int kTiles = 2;
static_assert(kAttentionWidth / 2 * kHalves <= kThreads, "threads have two elements of a value");

struct AttentionShared {
  alignas(16) float queries[kQueries][kAttentionWidth];
  alignas(16) float scores[kQueries][kKeys];
  alignas(16) unsigned char tiles[kTiles][kKeys * kPitch];
  float factors[kQueries];
};

// The queries of a CTA.
struct Queries {
  int64_t row, group, first;
  int count;

  __device__ __forceinline__ int64_t head(const AttentionParams& p, int m) const {
    return group * (p.heads / p.groups) + (first + m) / p.tokens;
  }
  __device__ __forceinline__ int64_t token(const AttentionParams& p, int m) const {
    return (first + m) % p.tokens;
  }
};

__device__ __forceinline__ float float_of(uint32_t word, int, float) {
  return core::bit_cast<float>(word);
}
// The lower or the upper half.
__device__ __forceinline__ float float_of(uint32_t word, int half, BFloat16) {
  return core::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}

template <class T>
__device__ __forceinline__ const T* rows_of(const void* base, const int64_t (&stride)[3],
                                            const Queries& of) {
  return static_cast<const T*>(base) + of.row * stride[0] + of.group * stride[1];
}

template <class T>
__device__ __forceinline__ void load_queries(AttentionShared& shared, const AttentionParams& p,
                                             const Queries& of) {
  const float factor = p.scale * core::kLog2E;
  for (int m = 0; m < kQueries; ++m) {
    const T* query = nullptr;
    if (m < of.count) {
      query = static_cast<const T*>(p.query) + of.row * p.query_stride[0] +
              of.head(p, m) * p.query_stride[1] + of.token(p, m) * p.query_stride[2];
    }
    for (int i = threadIdx.x; i < p.width; i += kThreads)
      shared.queries[m][i] = query == nullptr ? 0.0f : to_float(query[i]) * factor;
  }
}

// The tiles of a span: for each block the tiles of keys, then the tiles of values.
template <class T>
struct Tiles {
  const T *keys, *values;
  int64_t key_stride, value_stride;
  int key_bytes, value_bytes;  // of a row
  int of_keys, of_block;       // tiles of a block: of keys, and all
  int end;                     // keys of the span

  __device__ __forceinline__ Tiles(const AttentionParams& p, const Queries& of, int64_t first_key,
                                   int count)
      : keys(rows_of<T>(p.key, p.key_stride, of) + first_key * p.key_stride[2]),
        values(rows_of<T>(p.value, p.value_stride, of) + first_key * p.value_stride[2]),
        key_stride(p.key_stride[2]),
        value_stride(p.value_stride[2]),
        key_bytes(static_cast<int>(p.width * sizeof(T))),
        value_bytes(static_cast<int>(p.value_width * sizeof(T))),
        of_keys((key_bytes + kRowBytes - 1) / kRowBytes),
        of_block(of_keys + (value_bytes + kRowBytes - 1) / kRowBytes),
        end(count) {}

  // Begins to copy tile `number`, a batch also after the last tile.
  __device__ __forceinline__ void load(AttentionShared& shared, int number) const {
    const int begin = number / of_block * kKeys, part = number % of_block;
    if (begin < end) {
      const bool of_key = part < of_keys;
      const int bytes = of_key ? key_bytes : value_bytes;
      const int64_t stride = (of_key ? key_stride : value_stride) * sizeof(T);
      const unsigned char* const rows =
          reinterpret_cast<const unsigned char*>(of_key ? keys : values) + begin * stride;
      const int first = (of_key ? part : part - of_keys) * kRowBytes;
      POLYSPEC_UNROLL
      for (int u = 0; u < kLoads; ++u) {
        const int at = static_cast<int>(threadIdx.x) + u * kThreads;
        const int row = at / kVectors, byte = first + at % kVectors * 16;
        const bool is_there = begin + row < end && byte < bytes;
        copy_async(shared.tiles[number % kTiles] + row * kPitch + at % kVectors * 16,
                   is_there ? rows + row * stride + byte : rows, is_there ? 16 : 0);
      }
    }
    end_batch();
  }
};

__device__ __forceinline__ void load_four(const float* from, float (&to)[4]) {
  const Lane16 vector = *reinterpret_cast<const Lane16*>(from);
  POLYSPEC_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint64_t both = i < 2 ? vector.low : vector.high;
    to[i] = core::bit_cast<float>(static_cast<uint32_t>(both >> (i % 2 * 32)));
  }
}

// Sums of the products of this thread's key with its queries over `vectors` of a tile, from element
// `at` of the key on.
template <int kMine, class T>
__device__ __forceinline__ void multiply_tile(const AttentionShared& shared,
                                              const unsigned char* tile, int at, int vectors,
                                              float (&sums)[kOwn]) {
  constexpr int kEach = 4 / sizeof(T);  // elements of a word
  const int key = threadIdx.x % kKeys, half = threadIdx.x / kKeys;
  const Lane16* const mine = reinterpret_cast<const Lane16*>(tile + key * kPitch);
  Lane16 vector = mine[0];
  POLYSPEC_ROLLED  // code beyond the instruction cache would cost more
      for (int v = 0; v < vectors; ++v) {
    const Lane16 next = mine[v + 1 < vectors ? v + 1 : v];
    POLYSPEC_UNROLL
    for (int part = 0; part < kEach; ++part) {  // of four elements
      float queries[kMine][4];
      POLYSPEC_UNROLL
      for (int j = 0; j < kMine; ++j)
        load_four(&shared.queries[half + j * kHalves][at + (v * kEach + part) * 4], queries[j]);
      POLYSPEC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int number = (part * 4 + i) / kEach;  // of a word
        const uint64_t both = number < 2 ? vector.low : vector.high;
        const uint32_t word = static_cast<uint32_t>(both >> (number % 2 * 32));
        const float value = float_of(word, i % kEach, T());
        POLYSPEC_UNROLL
        for (int j = 0; j < kMine; ++j) sums[j] = __builtin_fmaf(value, queries[j][i], sums[j]);
      }
    }
    vector = next;
  }
}

// A warp's state of its query.
struct Weighed {
  float highest;  // score
  float lane;     // lanes below kSumLanes: a lane of the sum of weights
};

__device__ __forceinline__ float from_lane(float value, int lane) {
  return core::bit_cast<float>(__shfl_sync(0xffffffffu, core::bit_cast<uint32_t>(value), lane));
}

// Makes weights of the scores of this warp's query with the keys of a block, of which it sees the
// first `seen`.
template <class T>
__device__ __forceinline__ void weigh(AttentionShared& shared, int m, int seen, const T* mask,
                                      Weighed* query) {
  const int lane = threadIdx.x % kWarp;
  float scores[kKeys / kWarp];
  float highest = query->highest;
  POLYSPEC_UNROLL
  for (int u = 0; u < kKeys / kWarp; ++u) {
    const int key = lane + u * kWarp;
    float score = -core::kInfinity;
    if (key < seen) {
      score = shared.scores[m][key];
      if (mask != nullptr) score = __builtin_fmaf(to_float(mask[key]), core::kLog2E, score);
    }
    scores[u] = score;
    highest = score > highest ? score : highest;  // no NaN
  }
  highest = core::value_of(__reduce_max_sync(0xffffffffu, core::order_of(highest)));
  float factor = 1.0f;
  if (highest > query->highest) {
    factor = core::weight_of(query->highest - highest);
    query->highest = highest;
  }
  if (lane == 0) shared.factors[m] = factor;
  float sum = query->lane * factor;
  POLYSPEC_UNROLL
  for (int u = 0; u < kKeys / kWarp; ++u) {
    const float weight = core::weight_of(scores[u] - query->highest);
    shared.scores[m][lane + u * kWarp] = weight;
    sum += weight;
    sum += from_lane(weight, lane ^ kSumLanes);  // of the next 16 keys
  }
  query->lane = sum;
}

// Two elements of the queries' sums; this thread's queries are split, split + splits, ...
struct Elements {
  int at, split, splits;

  __device__ __forceinline__ explicit Elements(const AttentionParams& p) {
    const int pairs = static_cast<int>(p.value_width) / 2;
    at = 2 * (static_cast<int>(threadIdx.x) % pairs);
    split = static_cast<int>(threadIdx.x) / pairs;
    splits = kThreads / pairs;
    if (split >= splits) split = kQueries;  // no query is left for it
  }
  __device__ __forceinline__ int query(int j) const { return split + j * splits; }
};

// sums += weights times `count` values in a tile, of elements from byte `first` on.
template <int kMine, class T>
__device__ __forceinline__ void add_values(const AttentionShared& shared, const Elements& own,
                                           const unsigned char* tile, int first, int count,
                                           float (&sums)[kOwn][2]) {
  const int byte = own.at * static_cast<int>(sizeof(T)) - first;
  if (byte < 0 || byte >= kRowBytes) return;
  const float* weights[kMine];
  POLYSPEC_UNROLL
  for (int j = 0; j < kMine; ++j) {
    const int m = own.query(j) < kQueries ? own.query(j) : kQueries - 1;
    weights[j] = shared.scores[m];
    POLYSPEC_UNROLL
    for (int i = 0; i < 2; ++i) sums[j][i] *= shared.factors[m];
  }
  tile += byte;
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#pragma unroll 8
#endif
  for (int key = 0; key < count; ++key) {
    float value[2];
    if constexpr (sizeof(T) == 2) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(tile + key * kPitch);
      value[0] = float_of(both, 0, T());
      value[1] = float_of(both, 1, T());
    } else {
      const uint64_t both = *reinterpret_cast<const uint64_t*>(tile + key * kPitch);
      value[0] = float_of(static_cast<uint32_t>(both), 0, T());
      value[1] = float_of(static_cast<uint32_t>(both >> 32), 0, T());
    }
    POLYSPEC_UNROLL
    for (int j = 0; j < kMine; ++j) {
      POLYSPEC_UNROLL
      for (int i = 0; i < 2; ++i)
        sums[j][i] = __builtin_fmaf(value[i], weights[j][key], sums[j][i]);
    }
  }
}

// run(integral_constant) of how many queries a thread has, of kOwn at most: a power of two.
template <class Run>
__device__ __forceinline__ void with_count(int count, const Run& run) {
  static_assert(kOwn == 4, "1, 2 or 4");
  if (count == 1) {
    run(std::integral_constant<int, 1>());
  } else if (count == 2) {
    run(std::integral_constant<int, 2>());
  } else {
    run(std::integral_constant<int, 4>());
  }
}

// Grid: x over spans, groups of queries, heads of keys and rows, spans fastest.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ AttentionParams p, int64_t spans) {
  begin_kernel();
  POLYSPEC_DYNAMIC_SHARED(AttentionShared, shared);
  const int64_t queries = p.heads / p.groups * p.tokens;
  const int64_t parts = (queries + kQueries - 1) / kQueries;
  const int64_t span = blockIdx.x % spans, task = blockIdx.x / spans;
  Queries of{task / parts / p.groups, task / parts % p.groups, task % parts * kQueries, kQueries};
  if (queries - of.first < kQueries) of.count = static_cast<int>(queries - of.first);
  const int64_t first_key = span * kAttentionSpan;
  int64_t end = core::longest_seen(p, of.row, of.first, of.first + of.count);
  if (end > first_key + kAttentionSpan) end = first_key + kAttentionSpan;
  if (span > 0 && end <= first_key) return;  // no query reads it

  const Tiles<T> tiles(p, of, first_key, end < first_key ? 0 : static_cast<int>(end - first_key));
  POLYSPEC_UNROLL
  for (int ahead = 0; ahead < kTiles; ++ahead) tiles.load(shared, ahead);
  load_queries<T>(shared, p, of);
  const int warp = threadIdx.x / kWarp;
  Weighed weighed{-core::kLargest, 0.0f};
  const Elements own(p);
  const int of_thread = (of.count + own.splits - 1) / own.splits;
  float sums[kOwn][2] = {};
  int tile = 0;
  POLYSPEC_ROLLED
  for (int begin = 0; begin < tiles.end; begin += kKeys) {
    const int count = tiles.end - begin < kKeys ? tiles.end - begin : kKeys;
    float scores[kOwn] = {};
    POLYSPEC_ROLLED
    for (int part = 0; part < tiles.of_keys; ++part, ++tile) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the keys are there, and the queries
      const int left = tiles.key_bytes / 16 - part * kVectors;
      with_count((of.count + kHalves - 1) / kHalves, [&](auto mine) {
        multiply_tile<mine, T>(shared, shared.tiles[tile % kTiles],
                               part * (kRowBytes / static_cast<int>(sizeof(T))),
                               left < kVectors ? left : kVectors, scores);
      });
      if (part + 1 == tiles.of_keys) {
        POLYSPEC_UNROLL
        for (int j = 0; j < kOwn; ++j)
          shared.scores[threadIdx.x / kKeys + j * kHalves][threadIdx.x % kKeys] = scores[j];
      }
      __syncthreads();  // the keys are read, and the scores there
      tiles.load(shared, tile + kTiles);
    }
    if (warp < of.count) {
      const int64_t token = of.token(p, warp), at = first_key + begin;
      const int64_t left = core::keys_seen(p, of.row, token) - at;
      const int seen = static_cast<int>(left < 0 ? 0 : left < count ? left : count);
      const T* mask = static_cast<const T*>(p.mask);
      if (mask != nullptr) mask += of.row * p.mask_stride[0] + token * p.mask_stride[1] + at;
      weigh(shared, warp, seen, mask, &weighed);
    }
    POLYSPEC_ROLLED
    for (int part = tiles.of_keys; part < tiles.of_block; ++part, ++tile) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the values are there, and the weights
      with_count(of_thread, [&](auto mine) {
        add_values<mine, T>(shared, own, shared.tiles[tile % kTiles],
                            (part - tiles.of_keys) * kRowBytes, count, sums);
      });
      __syncthreads();  // the values are read
      tiles.load(shared, tile + kTiles);
    }
  }

  const int64_t row_queries = of.row * p.heads;
  const auto number = [&](int m) {
    return (row_queries + of.head(p, m)) * p.tokens + of.token(p, m);
  };
  const int lane = threadIdx.x % kWarp;
  if (spans > 1) {
    const auto kept = [&](int m) {
      return static_cast<float*>(p.workspace) +
             (number(m) * spans + span) * core::attention_kept(p.value_width);
    };
    if (warp < of.count) {
      float* const rest = kept(warp) + p.value_width;
      if (lane < kSumLanes) rest[lane] = weighed.lane;
      if (lane == 0) rest[kSumLanes] = weighed.highest;
    }
    for (int j = 0; j < kOwn; ++j) {
      if (own.query(j) >= of.count) break;
      kept(own.query(j))[own.at] = sums[j][0];
      kept(own.query(j))[own.at + 1] = sums[j][1];
    }
    return;
  }
  float total = 0.0f;
  for (int l = 0; l < kSumLanes; ++l) total += from_lane(weighed.lane, l);
  __syncthreads();  // the factors are read
  if (lane == 0) shared.factors[warp] = total == 0.0f ? 0.0f : 1.0f / total;
  __syncthreads();  // the factors of the sums are written
  for (int j = 0; j < kOwn; ++j) {
    const int m = own.query(j);
    if (m >= of.count) break;
    T* const to = static_cast<T*>(p.out) +
                  ((of.row * p.tokens + of.token(p, m)) * p.heads + of.head(p, m)) * p.value_width +
                  own.at;
    core::convert(sums[j][0] * shared.factors[m], to);
    core::convert(sums[j][1] * shared.factors[m], to + 1);
  }
}

struct LanesShared {
  float lanes[kSumLanes];
};

// A CTA merges the kept sums of a query's spans in order, and writes its row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ AttentionParams p, int64_t spans) {
  begin_kernel();
  POLYSPEC_SHARED(LanesShared, shared);
  const unsigned tokens = static_cast<unsigned>(p.tokens), heads = static_cast<unsigned>(p.heads);
  const int64_t token = blockIdx.x % tokens, head = blockIdx.x / tokens % heads;
  const int64_t row = blockIdx.x / tokens / heads, width = p.value_width;
  const int64_t each = core::attention_kept(width);
  const float* kept = static_cast<const float*>(p.workspace) + blockIdx.x * spans * each;
  const int64_t seen = core::keys_seen(p, row, token), at = threadIdx.x;
  const bool is_lane = at < kSumLanes;
  float sum = at < width ? kept[at] : 0.0f;
  float weight = is_lane ? kept[width + at] : 0.0f;
  float highest = kept[width + kSumLanes];
  for (int64_t span = 1; span * kAttentionSpan < seen; ++span) {
    const float* const next = kept + span * each;
    bool any = false;
    for (int l = 0; l < kSumLanes; ++l) any |= !(next[width + l] == 0.0f);
    if (!any) continue;
    const float other = next[width + kSumLanes], most = highest < other ? other : highest;
    const float mine = core::weight_of(highest - most), theirs = core::weight_of(other - most);
    if (is_lane) weight = __builtin_fmaf(next[width + at], theirs, weight * mine);
    if (at < width) sum = __builtin_fmaf(next[at], theirs, sum * mine);
    highest = most;
  }
  if (is_lane) shared.lanes[at] = weight;
  __syncthreads();  // all lanes are there
  float total = 0.0f;
  for (int l = 0; l < kSumLanes; ++l) total += shared.lanes[l];
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  if (at < width) {
    T* const to = static_cast<T*>(p.out) + ((row * p.tokens + token) * p.heads + head) * width;
    core::convert(sum * inverse, to + at);
  }
}

Result launch(void (*kernel)(AttentionParams, int64_t), int64_t ctas, size_t shared_bytes,
              const AttentionParams& params, int64_t spans, CUstream_st* stream) {
  if (ctas > 0x7fffffff) {
    return {Result::Code::kInvalidArgument,
            "batch, heads, tokens, length: expected fewer queries and spans than 2^31, given more"};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, params, spans));
}

template <class T>
Result attention_as(const AttentionParams& p, CUstream_st* stream) {
  const int64_t spans = core::attention_spans(p.length);
  const int64_t queries = p.heads / p.groups * p.tokens;
  const int64_t parts = (queries + kQueries - 1) / kQueries;
  constexpr size_t kBytes = sizeof(AttentionShared);
  const cudaError_t error = allow_dynamic<attention_kernel<T>>(current_device(), int{kBytes});
  if (error != cudaSuccess) return result_of(error);
  const Result result =
      launch(attention_kernel<T>, p.batch * p.groups * parts * spans, kBytes, p, spans, stream);
  if (!result.ok() || spans == 1) return result;
  return launch(merge_kernel<T>, p.batch * p.heads * p.tokens, 0, p, spans, stream);
}

}  // namespace

Result attention(const AttentionParams& params, CUstream_st* stream) {
  if (params.dtype == DType::kFloat32) return attention_as<float>(params, stream);
  return attention_as<BFloat16>(params, stream);
}

}  // namespace polyspec::cuda
