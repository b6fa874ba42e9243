// Attention of a few queries over a cache on CUDA, with the sums of cpu/attention.cpp in the same
// order: a CTA has up to eight queries that read the keys of one group, and a span of those keys.
// Where there are several spans, a second launch has them follow each other.
//
// Keys pass through shared memory, 64 bytes of 128 of them at a time, and a thread has the sums of
// one key; of values a thread has two elements. Everything is fused multiply-adds: with few queries
// the bytes of keys and values take longer.
#include "core/kv_index.hpp"
#include "core/layer_math.hpp"
#include "cuda/attention.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {
namespace {

using core::BFloat16;
using core::kSumLanes;
using core::Lane16;
using core::to_float;

constexpr int kThreads = 256, kWarp = 32;
constexpr int kQueries = kThreads / kWarp;  // of a CTA: a warp weighs the keys of each
constexpr int kKeys = core::kAttentionKeys;
constexpr int kHalves = kThreads / kKeys;    // of the queries, whose scores threads share out
constexpr int kVectors = 4;                  // of 16 bytes, of a key at a time
constexpr int kPitch = 16 * (kVectors + 1);  // so that eight keys lie in different banks
constexpr int kOwn = kQueries / kHalves;     // queries of a thread, at most
constexpr int kLoads = kKeys * kVectors / kThreads;
static_assert(kAttentionWidth / 2 * kHalves <= kThreads, "threads have two elements of a value");

struct AttentionShared {
  alignas(16) float queries[kQueries][kAttentionWidth];
  alignas(16) float scores[kQueries][kKeys];
  alignas(16) unsigned char keys[kKeys * kPitch];
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

// This thread's vectors of 64 bytes, number `chunk`, of each of `count` keys.
template <class T>
__device__ __forceinline__ void load_keys(const T* keys, int64_t stride, int count, int chunk,
                                          Lane16 (&next)[kLoads]) {
  POLYSPEC_UNROLL
  for (int u = 0; u < kLoads; ++u) {
    const int at = static_cast<int>(threadIdx.x) + u * kThreads;
    const int key = at / kVectors, vector = chunk * kVectors + at % kVectors;
    next[u] = Lane16{0, 0};
    if (key < count) next[u] = reinterpret_cast<const Lane16*>(keys + key * stride)[vector];
  }
}

// Sums of the products of this thread's key with its queries over one chunk, from element `at` on.
template <int kMine, class T>
__device__ __forceinline__ void multiply_chunk(const AttentionShared& shared, int at,
                                               float (&sums)[kOwn]) {
  constexpr int kEach = 4 / sizeof(T);  // elements of a word
  const int key = threadIdx.x % kKeys, half = threadIdx.x / kKeys;
  POLYSPEC_ROLLED  // code beyond the instruction cache would cost more
      for (int v = 0; v < kVectors; ++v) {
    const Lane16 vector =
        *reinterpret_cast<const Lane16*>(shared.keys + key * kPitch + v * sizeof(Lane16));
    POLYSPEC_UNROLL
    for (int i = 0; i < 4 * kEach; ++i) {
      const uint64_t both = i / kEach < 2 ? vector.low : vector.high;
      const uint32_t word = static_cast<uint32_t>(both >> (i / kEach % 2 * 32));
      const float value = float_of(word, i % kEach, T());
      POLYSPEC_UNROLL
      for (int j = 0; j < kMine; ++j) {
        const float query = shared.queries[half + j * kHalves][at + v * 4 * kEach + i];
        sums[j] = __builtin_fmaf(value, query, sums[j]);
      }
    }
  }
}

// Scores of the queries with `count` keys of a block, of which those beyond are anything. Barriers
// stand between all of it.
template <int kMine, class T>
__device__ __forceinline__ void score_keys(AttentionShared& shared, const AttentionParams& p,
                                           const T* keys, int count) {
  constexpr int kElements = kVectors * 16 / sizeof(T);  // of a chunk
  const int chunks = static_cast<int>(p.width) / kElements;
  float sums[kOwn] = {};
  Lane16 next[kLoads];
  load_keys(keys, p.key_stride[2], count, 0, next);
  POLYSPEC_ROLLED
  for (int chunk = 0; chunk < chunks; ++chunk) {
    POLYSPEC_UNROLL
    for (int u = 0; u < kLoads; ++u) {
      const int at = static_cast<int>(threadIdx.x) + u * kThreads;
      *reinterpret_cast<Lane16*>(shared.keys + at / kVectors * kPitch + at % kVectors * 16) =
          next[u];
    }
    __syncthreads();  // the chunk is there
    if (chunk + 1 < chunks) load_keys(keys, p.key_stride[2], count, chunk + 1, next);
    multiply_chunk<kMine, T>(shared, chunk * kElements, sums);
    __syncthreads();  // the chunk is read
  }
  const int key = threadIdx.x % kKeys, half = threadIdx.x / kKeys;
  POLYSPEC_UNROLL
  for (int j = 0; j < kMine; ++j) shared.scores[half + j * kHalves][key] = sums[j];
  __syncthreads();  // the scores are there
}

// What a warp knows of its query.
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

// Two elements of what queries have summed up; this thread's queries are split, split + splits, ...
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

// sums += weights times `count` values.
template <int kMine, class T>
__device__ __forceinline__ void add_values(const AttentionShared& shared, const Elements& own,
                                           const T* values, int64_t stride, int count,
                                           float (&sums)[kOwn][2]) {
  const float* weights[kMine];
  POLYSPEC_UNROLL
  for (int j = 0; j < kMine; ++j) {
    const int m = own.query(j) < kQueries ? own.query(j) : kQueries - 1;
    weights[j] = shared.scores[m];
    POLYSPEC_UNROLL
    for (int i = 0; i < 2; ++i) sums[j][i] *= shared.factors[m];
  }
  values += own.at;
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#pragma unroll 8
#endif
  for (int key = 0; key < count; ++key) {
    float value[2];
    if constexpr (sizeof(T) == 2) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(values + key * stride);
      value[0] = float_of(both, 0, T());
      value[1] = float_of(both, 1, T());
    } else {
      const uint64_t both = *reinterpret_cast<const uint64_t*>(values + key * stride);
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
  POLYSPEC_SHARED(AttentionShared, shared);
  const int64_t queries = p.heads / p.groups * p.tokens;
  const int64_t parts = (queries + kQueries - 1) / kQueries;
  const int64_t span = blockIdx.x % spans, task = blockIdx.x / spans;
  Queries of{task / parts / p.groups, task / parts % p.groups, task % parts * kQueries, kQueries};
  if (queries - of.first < kQueries) of.count = static_cast<int>(queries - of.first);
  const int64_t first_key = span * kAttentionSpan;
  int64_t end = core::longest_seen(p, of.row, of.first, of.first + of.count);
  if (end > first_key + kAttentionSpan) end = first_key + kAttentionSpan;
  if (span > 0 && end <= first_key) return;  // nobody reads it

  load_queries<T>(shared, p, of);
  const int warp = threadIdx.x / kWarp;
  Weighed weighed{-core::kLargest, 0.0f};
  const Elements own(p);
  const int of_thread = (of.count + own.splits - 1) / own.splits;
  float sums[kOwn][2] = {};
  POLYSPEC_ROLLED
  for (int64_t begin = first_key; begin < end; begin += kKeys) {
    const int count = static_cast<int>(end - begin < kKeys ? end - begin : kKeys);
    const T* const keys = rows_of<T>(p.key, p.key_stride, of) + begin * p.key_stride[2];
    with_count((of.count + kHalves - 1) / kHalves,
               [&](auto mine) { score_keys<mine, T>(shared, p, keys, count); });
    if (warp < of.count) {
      const int64_t token = of.token(p, warp);
      const int64_t left = core::keys_seen(p, of.row, token) - begin;
      const int seen = static_cast<int>(left < 0 ? 0 : left < count ? left : count);
      const T* mask = static_cast<const T*>(p.mask);
      if (mask != nullptr) mask += of.row * p.mask_stride[0] + token * p.mask_stride[1] + begin;
      weigh(shared, warp, seen, mask, &weighed);
    }
    __syncthreads();  // the weights are there
    const T* const values = rows_of<T>(p.value, p.value_stride, of) + begin * p.value_stride[2];
    with_count(of_thread, [&](auto mine) {
      add_values<mine>(shared, own, values, p.value_stride[2], count, sums);
    });
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
  __syncthreads();  // what sums are multiplied with is there
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

// A CTA has what a query has kept of its spans follow each other, and writes its row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ AttentionParams p, int64_t spans) {
  POLYSPEC_SHARED(LanesShared, shared);
  const int64_t token = blockIdx.x % p.tokens, head = blockIdx.x / p.tokens % p.heads;
  const int64_t row = blockIdx.x / p.tokens / p.heads, width = p.value_width;
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

Result launch(void (*kernel)(AttentionParams, int64_t), int64_t ctas, const AttentionParams& params,
              int64_t spans, CUstream_st* stream) {
  if (ctas > 0x7fffffff) {
    return {Result::Code::kInvalidArgument,
            "batch, heads, tokens, length: expected fewer queries and spans than 2^31, given more"};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, params, spans));
}

template <class T>
Result attention_as(const AttentionParams& p, CUstream_st* stream) {
  const int64_t spans = core::attention_spans(p.length);
  const int64_t queries = p.heads / p.groups * p.tokens;
  const int64_t parts = (queries + kQueries - 1) / kQueries;
  const Result result =
      launch(attention_kernel<T>, p.batch * p.groups * parts * spans, p, spans, stream);
  if (!result.ok() || spans == 1) return result;
  return launch(merge_kernel<T>, p.batch * p.heads * p.tokens, p, spans, stream);
}

}  // namespace

Result attention(const AttentionParams& params, CUstream_st* stream) {
  if (params.dtype == DType::kFloat32) return attention_as<float>(params, stream);
  return attention_as<BFloat16>(params, stream);
}

}  // namespace polyspec::cuda
