// Attention of a few queries over a cache on CUDA, with the sums of cpu/attention.cpp in the same
// order: a CTA has queries that read the keys of one group, all of them up to 64, and a span of
// these keys. Where there are several spans, a second launch merges them in order.
//
// Keys and values pass through shared memory in tiles, 256 bytes of 128 of them, copied two tiles
// ahead. A thread has the sums of a few keys with a few queries, and of two elements of values of a
// few queries: the more, the fewer loads from shared memory. Everything is fused multiply-adds:
// tensor cores add in an order that differs between devices, and no CPU has their bits.
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

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kKeys = core::kAttentionKeys;
constexpr int kVectors = 16;  // of 16 bytes, of a key in a tile
constexpr int kRowBytes = 16 * kVectors;
constexpr int kPitch = kRowBytes + 16;      // so that eight keys lie in different banks
constexpr int kRows = kThreads / kVectors;  // that are copied at once
constexpr int kTiles = 2;

// Sizes of a CTA of up to kMost queries. With few it waits for memory, so that two CTAs share a
// multiprocessor; with many it computes.
template <int kMost>
struct Form {
  static constexpr bool kMany = kMost > kFewQueries;
  static constexpr int kCtas = kMany ? 1 : 2;
  static constexpr int kKeysEach = kMany ? 4 : 2;               // of a thread
  static constexpr int kSplits = kThreads * kKeysEach / kKeys;  // of the queries
  static constexpr int kStep = kMany ? 2 : 1;  // code for every count would take too long to load
  static constexpr int kScores = kMost / kSplits;  // queries of a thread
  static constexpr int kFloats = most_queries(kMost, kAttentionWidth) * kAttentionWidth;
  static constexpr int kSums = kFloats / (2 * kAttentionWidth);  // queries of a thread
  static_assert(kMost * kAttentionWidth / 2 <= kFloats && kMost / 4 <= kSums);
};

template <int kMost>
struct AttentionShared {
  alignas(16) float queries[Form<kMost>::kFloats];
  alignas(16) float scores[kMost + Form<kMost>::kStep - 1][kKeys];
  alignas(16) unsigned char tiles[kTiles][kKeys * kPitch];
  float lanes[kMost][kSumLanes];  // of the sums of weights
  float highest[kMost];           // score
  float factors[kMost];
  int head[kMost], token[kMost];
  int seen[kMost];  // keys of the span
};
static_assert(sizeof(AttentionShared<kFewQueries>) <= 99 << 10, "every device has room for few");
static_assert(2 * sizeof(AttentionShared<kFewQueries>) <= 226 << 10, "and sm_90 for two CTAs");

// The queries of a CTA.
struct Queries {
  int64_t row, group;
  unsigned first;
  int count;
};

__device__ __forceinline__ float float_of(uint32_t word, int, float) {
  return core::bit_cast<float>(word);
}
// The lower or the upper half.
__device__ __forceinline__ float float_of(uint32_t word, int half, BFloat16) {
  return core::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}

template <class T>
__device__ __forceinline__ const unsigned char* rows_of(const void* base,
                                                        const int64_t (&stride)[3],
                                                        const Queries& of, int64_t key) {
  return reinterpret_cast<const unsigned char*>(static_cast<const T*>(base) + of.row * stride[0] +
                                                of.group * stride[1] + key * stride[2]);
}

// Brings a span's first block closer; lengths are not known yet.
template <class T>
__device__ __forceinline__ void prefetch_block(const AttentionParams& p, const Queries& of,
                                               int64_t first_key) {
  static_assert(kThreads == 2 * kKeys);
  const int64_t key = first_key + threadIdx.x % kKeys;
  if (key >= p.length) return;
  const bool is_key = threadIdx.x < kKeys;
  prefetch(is_key ? rows_of<T>(p.key, p.key_stride, of, key)
                  : rows_of<T>(p.value, p.value_stride, of, key),
           static_cast<unsigned>((is_key ? p.width : p.value_width) * sizeof(T)));
}

template <class T>
__device__ __forceinline__ const T* mask_of(const AttentionParams& p, int64_t row, int64_t token,
                                            int64_t key) {
  return static_cast<const T*>(p.mask) + row * p.mask_stride[0] + token * p.mask_stride[1] + key;
}

// Whether the mask hides all of `keys` keys of a span from all queries. Their weights would be 0,
// so that leaving them out changes no bit.
template <class T>
__device__ __forceinline__ bool is_hidden(const AttentionParams& p, const Queries& of,
                                          int64_t first_key, int keys) {
  const unsigned tokens = static_cast<unsigned>(p.tokens);
  POLYSPEC_ROLLED
  for (int m = 0; m < of.count && static_cast<unsigned>(m) < tokens; ++m) {  // of a head
    const T* const mask = mask_of<T>(p, of.row, (of.first + m) % tokens, first_key);
    bool seen = false;
    POLYSPEC_UNROLL
    for (int u = 0; u < kAttentionSpan / kThreads; ++u) {
      const int key = static_cast<int>(threadIdx.x) + u * kThreads;
      if (key < keys) seen |= !core::hides(to_float(mask[key]));
    }
    if (__syncthreads_count(seen) > 0) return false;
  }
  return true;
}

// Heads and tokens of the queries, and sums of no key.
template <int kMost>
__device__ __forceinline__ void begin_queries(AttentionShared<kMost>& shared,
                                              const AttentionParams& p, const Queries& of,
                                              unsigned share, int64_t first_key) {
  const int m = static_cast<int>(threadIdx.x);
  if (m >= of.count) return;
  const unsigned tokens = static_cast<unsigned>(p.tokens), token = (of.first + m) % tokens;
  const int64_t seen = core::keys_seen(p, of.row, token) - first_key;
  shared.head[m] = static_cast<int>(of.group * share + (of.first + m) / tokens);
  shared.token[m] = static_cast<int>(token);
  shared.seen[m] = static_cast<int>(seen < 0 ? 0 : seen < kAttentionSpan ? seen : kAttentionSpan);
  shared.highest[m] = -core::kLargest;
  for (int l = 0; l < kSumLanes; ++l) shared.lanes[m][l] = 0.0f;
}

// A warp loads its queries, several before it stores the first.
template <class T, int kMost>
__device__ __forceinline__ void load_queries(AttentionShared<kMost>& shared,
                                             const AttentionParams& p, const Queries& of) {
  constexpr int kAtOnce = Form<kMost>::kMany ? 4 : 2, kEach = kAttentionWidth / kWarp;
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(p.width);
  const float factor = p.scale * core::kLog2E;
  POLYSPEC_ROLLED
  for (int first = threadIdx.x / kWarp; first < of.count; first += kAtOnce * kWarps) {
    float values[kAtOnce][kEach];
    POLYSPEC_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int m = first + j * kWarps;
      if (m >= of.count) break;
      const T* const query = static_cast<const T*>(p.query) + of.row * p.query_stride[0] +
                             shared.head[m] * p.query_stride[1] +
                             shared.token[m] * p.query_stride[2] + lane;
      POLYSPEC_UNROLL
      for (int i = 0; i < kEach; ++i)
        values[j][i] = i * kWarp < width ? to_float(query[i * kWarp]) * factor : 0.0f;
    }
    POLYSPEC_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int m = first + j * kWarps;
      if (m >= of.count) break;
      POLYSPEC_UNROLL
      for (int i = 0; i < kEach; ++i) {
        if (i * kWarp < width) shared.queries[m * width + lane + i * kWarp] = values[j][i];
      }
    }
  }
}

// The tiles of a span in the order of their copies: for each block the tiles of keys, then the
// tiles of values.
template <class T>
struct Tiles {
  const unsigned char *keys, *values;
  int64_t key_stride, value_stride;   // bytes
  int key_bytes, value_bytes;         // of a row
  int of_keys, of_block;              // tiles of a block: of keys, and all
  int end;                            // keys of the span
  int begin = 0, part = 0, slot = 0;  // of the next copy

  __device__ __forceinline__ Tiles(const AttentionParams& p, const Queries& of, int64_t first_key,
                                   int count)
      : keys(rows_of<T>(p.key, p.key_stride, of, first_key)),
        values(rows_of<T>(p.value, p.value_stride, of, first_key)),
        key_stride(p.key_stride[2] * static_cast<int64_t>(sizeof(T))),
        value_stride(p.value_stride[2] * static_cast<int64_t>(sizeof(T))),
        key_bytes(static_cast<int>(p.width * sizeof(T))),
        value_bytes(static_cast<int>(p.value_width * sizeof(T))),
        of_keys((key_bytes + kRowBytes - 1) / kRowBytes),
        of_block(of_keys + (value_bytes + kRowBytes - 1) / kRowBytes),
        end(count) {}

  // Begins to copy the next tile, a batch also after the last tile.
  __device__ __forceinline__ void load(unsigned char (&tiles)[kTiles][kKeys * kPitch]) {
    const bool of_key = part < of_keys;
    const int64_t stride = of_key ? key_stride : value_stride;
    const int row = begin + static_cast<int>(threadIdx.x) / kVectors;
    const int at = static_cast<int>(threadIdx.x) % kVectors * 16;
    const int byte = (of_key ? part : part - of_keys) * kRowBytes + at;
    if (begin < end && byte < (of_key ? key_bytes : value_bytes)) {
      const unsigned char* const from = (of_key ? keys : values) + row * stride + byte;
      unsigned char* const to = tiles[slot] + (row - begin) * kPitch + at;
      POLYSPEC_UNROLL
      for (int u = 0; u < kKeys / kRows; ++u) {
        copy_async(to + u * kRows * kPitch, from + u * kRows * stride,
                   row + u * kRows < end ? 16 : 0);
      }
    }
    end_batch();
    slot = (slot + 1) % kTiles;
    if (++part < of_block) return;
    part = 0;
    begin += kKeys;
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

// run(integral_constant) of `count`, at most kMost, or up to kStep - 1 more.
template <int kMost, int kStep, class Run>
__device__ __forceinline__ void with_count(int count, const Run& run) {
  if constexpr (kMost > kStep) {
    if (count <= kMost - kStep) return with_count<kMost - kStep, kStep>(count, run);
  }
  run(std::integral_constant<int, kMost>());
}

// The keys and queries of which a thread has the scores: the first of both, then every
// kKeyThreads-th and every kSplits-th. The threads of a warp have the same queries.
template <int kMost>
struct Pairs {
  static constexpr int kKeyThreads = kKeys / Form<kMost>::kKeysEach;
  static_assert(kKeyThreads % kWarp == 0);
  int key, query;

  __device__ __forceinline__ Pairs()
      : key(static_cast<int>(threadIdx.x) % kKeyThreads),
        query(static_cast<int>(threadIdx.x) / kKeyThreads) {}
  __device__ __forceinline__ int queries(int count) const {
    return (count - query + Form<kMost>::kSplits - 1) / Form<kMost>::kSplits;
  }
};

// Sums of the products of this thread's keys and queries over `vectors` of a tile. `queries`: from
// the tile's first element on.
template <int kMine, int kMost, class T>
__device__ __forceinline__ void multiply_tile(
    const float* queries, int width, const unsigned char* tile, int vectors,
    float (&sums)[Form<kMost>::kKeysEach][Form<kMost>::kScores]) {
  constexpr int kEach = 4 / sizeof(T);  // elements of a word
  constexpr int kKeysEach = Form<kMost>::kKeysEach;
  const Pairs<kMost> own;
  queries += own.query * width;
  tile += own.key * kPitch;
  const auto keys = [&](int v, Lane16(&to)[kKeysEach]) {
    POLYSPEC_UNROLL
    for (int k = 0; k < kKeysEach; ++k)
      to[k] = reinterpret_cast<const Lane16*>(tile + k * Pairs<kMost>::kKeyThreads * kPitch)[v];
  };
  Lane16 vector[kKeysEach];
  keys(0, vector);
  POLYSPEC_ROLLED  // code beyond the instruction cache would cost more
      for (int v = 0; v < vectors; ++v) {
    Lane16 next[kKeysEach];
    keys(v + 1 < vectors ? v + 1 : v, next);
    POLYSPEC_UNROLL
    for (int part = 0; part < kEach; ++part) {  // of four elements
      float query[kMine][4];
      POLYSPEC_UNROLL
      for (int j = 0; j < kMine; ++j)
        load_four(queries + j * Form<kMost>::kSplits * width + (v * kEach + part) * 4, query[j]);
      POLYSPEC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int number = (part * 4 + i) / kEach;  // of a word
        POLYSPEC_UNROLL
        for (int k = 0; k < kKeysEach; ++k) {
          const uint64_t both = number < 2 ? vector[k].low : vector[k].high;
          const uint32_t word = static_cast<uint32_t>(both >> (number % 2 * 32));
          const float value = float_of(word, i % kEach, T());
          POLYSPEC_UNROLL
          for (int j = 0; j < kMine; ++j)
            sums[k][j] = __builtin_fmaf(value, query[j][i], sums[k][j]);
        }
      }
    }
    POLYSPEC_UNROLL
    for (int k = 0; k < kKeysEach; ++k) vector[k] = next[k];
  }
}

__device__ __forceinline__ float from_lane(float value, int lane) {
  return core::bit_cast<float>(__shfl_sync(0xffffffffu, core::bit_cast<uint32_t>(value), lane));
}

// A query's mask of the keys of a block, of which it sees the first `seen`; a lane has every 32nd.
struct Masked {
  float of[kKeys / kWarp];

  template <class T>
  __device__ __forceinline__ void load(const T* mask, int seen) {
    POLYSPEC_UNROLL
    for (int u = 0; u < kKeys / kWarp; ++u) {
      const int key = static_cast<int>(threadIdx.x) % kWarp + u * kWarp;
      of[u] = key < seen ? to_float(mask[key]) : 0.0f;
    }
  }
};

// Makes weights of the scores of a warp's query with the `count` keys of a block. After them come
// -0, which times the zeros of a tile after its values change no sum.
template <int kMost>
__device__ __forceinline__ void weigh(AttentionShared<kMost>& shared, int m, int seen, int count,
                                      bool is_masked, const Masked& mask) {
  const int lane = threadIdx.x % kWarp;
  float scores[kKeys / kWarp];
  const float before = shared.highest[m];
  float highest = before;
  POLYSPEC_UNROLL
  for (int u = 0; u < kKeys / kWarp; ++u) {
    const int key = lane + u * kWarp;
    float score = -core::kInfinity;
    if (key < seen) {
      score = shared.scores[m][key];
      if (is_masked) score = __builtin_fmaf(mask.of[u], core::kLog2E, score);
    }
    scores[u] = score;
    highest = score > highest ? score : highest;  // no NaN
  }
  highest = core::value_of(__reduce_max_sync(0xffffffffu, core::order_of(highest)));
  const bool higher = highest > before;
  if (!higher) highest = before;
  const float factor = higher ? core::weight_of(before - highest) : 1.0f;
  float sum = lane < kSumLanes ? shared.lanes[m][lane] * factor : 0.0f;
  POLYSPEC_UNROLL
  for (int u = 0; u < kKeys / kWarp; ++u) {
    const float weight = core::weight_of(scores[u] - highest);
    shared.scores[m][lane + u * kWarp] = lane + u * kWarp < count ? weight : -0.0f;
    sum += weight;
    sum += from_lane(weight, lane ^ kSumLanes);  // of the next 16 keys
  }
  if (lane < kSumLanes) shared.lanes[m][lane] = sum;
  __syncwarp();  // all lanes have the highest score before
  if (lane == 0) {
    shared.highest[m] = highest;
    shared.factors[m] = factor;
  }
}

// A warp weighs every eighth query, the mask of the next loaded before.
template <class T, int kMost>
__device__ __forceinline__ void weigh_block(AttentionShared<kMost>& shared,
                                            const AttentionParams& p, const Queries& of,
                                            int64_t first_key, int begin, int count) {
  const bool is_masked = p.mask != nullptr;
  const auto seen = [&](int m) { return shared.seen[m] - begin; };
  const auto load = [&](int m, Masked& to) {
    if (!is_masked || m >= of.count) return;
    to.load(mask_of<T>(p, of.row, shared.token[m], first_key + begin), seen(m));
  };
  Masked next = {};
  load(threadIdx.x / kWarp, next);
  POLYSPEC_ROLLED
  for (int m = threadIdx.x / kWarp; m < of.count; m += kWarps) {
    const Masked masked = next;
    load(m + kWarps, next);
    weigh(shared, m, seen(m), count, is_masked, masked);
  }
}

// Two elements of the sums of `count` queries from `first` on.
struct Elements {
  int at, first, count;

  __device__ __forceinline__ Elements(const AttentionParams& p, const Queries& of) {
    const int pairs = static_cast<int>(p.value_width) / 2;
    const int split = static_cast<int>(threadIdx.x) / pairs, splits = kThreads / pairs;
    at = 2 * (static_cast<int>(threadIdx.x) % pairs);
    const int each = (of.count + splits - 1) / splits, left = of.count - split * each;
    first = split * each;
    count = split >= splits || left < 0 ? 0 : left < each ? left : each;
  }
};

template <class T>
__device__ __forceinline__ void load_value(const unsigned char* from, float (&value)[2]) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(from);
    value[0] = float_of(both, 0, T());
    value[1] = float_of(both, 1, T());
  } else {
    const uint64_t both = *reinterpret_cast<const uint64_t*>(from);
    value[0] = float_of(static_cast<uint32_t>(both), 0, T());
    value[1] = float_of(static_cast<uint32_t>(both >> 32), 0, T());
  }
}

// sums += weights times `count` values, which begin at `tile`, and times the zeros after them.
template <int kMine, class T, int kMost>
__device__ __forceinline__ void add_values(const AttentionShared<kMost>& shared,
                                           const Elements& own, const unsigned char* tile,
                                           int count, float (&sums)[Form<kMost>::kSums][2]) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#pragma unroll(kMine < 4 ? 4 / kMine : 1)
#endif
  for (int key = 0; key < count; key += 4) {
    float value[4][2];
    POLYSPEC_UNROLL
    for (int k = 0; k < 4; ++k) load_value<T>(tile + (key + k) * kPitch, value[k]);
    POLYSPEC_UNROLL
    for (int j = 0; j < kMine; ++j) {
      float weight[4];
      load_four(&shared.scores[own.first + j][key], weight);
      POLYSPEC_UNROLL
      for (int k = 0; k < 4; ++k) {
        POLYSPEC_UNROLL
        for (int i = 0; i < 2; ++i) sums[j][i] = __builtin_fmaf(value[k][i], weight[k], sums[j][i]);
      }
    }
  }
}

// A CTA takes `each` of the queries that read the same keys. Grid: x over parts of these queries,
// spans, heads of keys and rows, parts fastest: while keys are read for one, another finds them in
// the second-level cache.
template <class T, int kMost>
__global__ void __launch_bounds__(kThreads, Form<kMost>::kCtas)
    attention_kernel(const __grid_constant__ AttentionParams p, unsigned spans, unsigned parts,
                     int each) {
  launch_dependents();
  using Shared = AttentionShared<kMost>;
  POLYSPEC_DYNAMIC_SHARED(Shared, shared);
  const unsigned groups = static_cast<unsigned>(p.groups);
  const unsigned part_of = blockIdx.x % parts, span = blockIdx.x / parts % spans;
  const unsigned task = blockIdx.x / parts / spans;
  Queries of{task / groups, task % groups, part_of * static_cast<unsigned>(each), each};
  const unsigned share = static_cast<unsigned>(p.heads) / groups;
  const unsigned left = share * static_cast<unsigned>(p.tokens) - of.first;
  if (left < static_cast<unsigned>(each)) of.count = static_cast<int>(left);
  const int64_t first_key = int64_t{span} * kAttentionSpan;
  if (part_of == 0) prefetch_block<T>(p, of, first_key);
  wait_for_prerequisites();
  int64_t end = core::longest_seen(p, of.row, of.first, of.first + of.count);
  if (end > first_key + kAttentionSpan) end = first_key + kAttentionSpan;
  if (span > 0 && end <= first_key) return;  // no query reads it

  Tiles<T> tiles(p, of, first_key, end < first_key ? 0 : static_cast<int>(end - first_key));
  POLYSPEC_UNROLL
  for (int ahead = 0; ahead < kTiles; ++ahead) tiles.load(shared.tiles);
  if (p.mask != nullptr && is_hidden<T>(p, of, first_key, tiles.end)) {
    wait_for_batches<0>();
    tiles.end = 0;
  }
  begin_queries(shared, p, of, share, first_key);
  __syncthreads();  // the queries' tokens are there
  if (tiles.end > 0) load_queries<T>(shared, p, of);
  const int width = static_cast<int>(p.width);
  const Pairs<kMost> pairs;
  const Elements own(p, of);
  const int value_part = own.at * static_cast<int>(sizeof(T)) / kRowBytes;
  float sums[Form<kMost>::kSums][2] = {};
  int slot = 0;
  POLYSPEC_ROLLED
  for (int begin = 0; begin < tiles.end; begin += kKeys) {
    const int count = tiles.end - begin < kKeys ? tiles.end - begin : kKeys;
    float scores[Form<kMost>::kKeysEach][Form<kMost>::kScores] = {};
    POLYSPEC_ROLLED
    for (int part = 0; part < tiles.of_keys; ++part, slot = (slot + 1) % kTiles) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the keys are there, and the queries
      const int vectors = tiles.key_bytes / 16 - part * kVectors;
      if (pairs.query < of.count) {
        with_count<Form<kMost>::kScores, Form<kMost>::kStep>(
            pairs.queries(of.count), [&](auto mine) {
              multiply_tile<mine, kMost, T>(
                  shared.queries + part * (kRowBytes / static_cast<int>(sizeof(T))), width,
                  shared.tiles[slot], vectors < kVectors ? vectors : kVectors, scores);
            });
      }
      if (part + 1 == tiles.of_keys) {
        POLYSPEC_UNROLL
        for (int j = 0; j < Form<kMost>::kScores; ++j) {
          const int m = pairs.query + j * Form<kMost>::kSplits;
          if (m >= of.count) break;
          POLYSPEC_UNROLL
          for (int k = 0; k < Form<kMost>::kKeysEach; ++k)
            shared.scores[m][pairs.key + k * Pairs<kMost>::kKeyThreads] = scores[k][j];
        }
      }
      __syncthreads();  // the keys are read, and the scores there
      tiles.load(shared.tiles);
    }
    weigh_block<T>(shared, p, of, first_key, begin, count);
    POLYSPEC_ROLLED
    for (int part = 0; part < tiles.of_block - tiles.of_keys; ++part, slot = (slot + 1) % kTiles) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the values are there, and the weights
      if (part == value_part && own.count > 0) {
        const unsigned char* const tile =
            shared.tiles[slot] + own.at * static_cast<int>(sizeof(T)) - part * kRowBytes;
        POLYSPEC_UNROLL
        for (int j = 0; j < Form<kMost>::kSums; ++j) {
          if (j >= own.count) break;
          for (int i = 0; i < 2; ++i) sums[j][i] *= shared.factors[own.first + j];
        }
        with_count<Form<kMost>::kSums, Form<kMost>::kStep>(
            own.count, [&](auto mine) { add_values<mine, T>(shared, own, tile, count, sums); });
      }
      __syncthreads();  // the values are read
      tiles.load(shared.tiles);
    }
  }

  // By rows of sums, in the memory of the queries.
  const int value_width = static_cast<int>(p.value_width);
  POLYSPEC_UNROLL
  for (int j = 0; j < Form<kMost>::kSums; ++j) {
    if (j >= own.count) break;
    float* const to = shared.queries + (own.first + j) * value_width + own.at;
    for (int i = 0; i < 2; ++i) to[i] = sums[j][i];
  }
  __syncthreads();  // the sums are there
  const int lane = threadIdx.x % kWarp;
  POLYSPEC_ROLLED
  for (int m = threadIdx.x / kWarp; m < of.count; m += kWarps) {
    const float* const from = shared.queries + m * value_width;
    const int64_t head = shared.head[m], token = shared.token[m];
    if (spans > 1) {
      const int64_t number = (of.row * p.heads + head) * p.tokens + token;
      float* const to = static_cast<float*>(p.workspace) +
                        (number * spans + span) * core::attention_kept(value_width);
      POLYSPEC_ROLLED
      for (int i = lane; i < value_width; i += kWarp) to[i] = from[i];
      if (lane < kSumLanes) to[value_width + lane] = shared.lanes[m][lane];
      if (lane == 0) to[value_width + kSumLanes] = shared.highest[m];
      continue;
    }
    float total = 0.0f;
    for (int l = 0; l < kSumLanes; ++l) total += shared.lanes[m][l];
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    T* const to =
        static_cast<T*>(p.out) + ((of.row * p.tokens + token) * p.heads + head) * value_width;
    POLYSPEC_ROLLED
    for (int i = lane; i < value_width; i += kWarp) core::convert(from[i] * inverse, to + i);
  }
}

constexpr int kSpansAtOnce = 8;
struct MergeShared {
  float kept[kSpansAtOnce * core::attention_kept(kAttentionWidth)];
  float lanes[kSumLanes];
};

// A CTA merges the kept sums of a query's spans in order, and writes its row. It waits once for
// eight spans.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ AttentionParams p, unsigned spans) {
  begin_kernel();
  POLYSPEC_SHARED(MergeShared, shared);
  const unsigned tokens = static_cast<unsigned>(p.tokens), heads = static_cast<unsigned>(p.heads);
  const int64_t token = blockIdx.x % tokens, head = blockIdx.x / tokens % heads;
  const int64_t row = blockIdx.x / tokens / heads;
  const int width = static_cast<int>(p.value_width), at = static_cast<int>(threadIdx.x);
  const int each = static_cast<int>(core::attention_kept(width));
  const float* kept = static_cast<const float*>(p.workspace) + int64_t{blockIdx.x} * spans * each;
  const int64_t seen = core::keys_seen(p, row, token);
  const int count = seen <= kAttentionSpan ? 1 : static_cast<int>(core::attention_spans(seen));
  const bool is_lane = at < kSumLanes;
  float sum = 0.0f, weight = 0.0f, highest = 0.0f;
  POLYSPEC_ROLLED
  for (int first = 0; first < count; first += kSpansAtOnce, kept += kSpansAtOnce * each) {
    const int some = count - first < kSpansAtOnce ? count - first : kSpansAtOnce;
    constexpr int kLoads = (sizeof(shared.kept) / sizeof(float) + kThreads - 1) / kThreads;
    float values[kLoads];
    POLYSPEC_UNROLL
    for (int u = 0; u < kLoads; ++u) {
      if (at + u * kThreads < some * each) values[u] = kept[at + u * kThreads];
    }
    if (first > 0) __syncthreads();  // the spans before are merged
    POLYSPEC_UNROLL
    for (int u = 0; u < kLoads; ++u) {
      if (at + u * kThreads < some * each) shared.kept[at + u * kThreads] = values[u];
    }
    __syncthreads();  // the spans are there
    POLYSPEC_ROLLED
    for (int s = 0; s < some; ++s) {
      const float* const next = shared.kept + s * each;
      const float sum_of_next = at < width ? next[at] : 0.0f;
      const float weight_of_next = is_lane ? next[width + at] : 0.0f;
      const float other = next[width + kSumLanes];
      if (first + s == 0) {
        sum = sum_of_next;
        weight = weight_of_next;
        highest = other;
        continue;
      }
      bool any = false;
      for (int l = 0; l < kSumLanes; ++l) any |= !(next[width + l] == 0.0f);
      if (!any) continue;
      const float most = highest < other ? other : highest;
      const float mine = core::weight_of(highest - most), theirs = core::weight_of(other - most);
      weight = __builtin_fmaf(weight_of_next, theirs, weight * mine);
      sum = __builtin_fmaf(sum_of_next, theirs, sum * mine);
      highest = most;
    }
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

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t ctas, size_t shared_bytes,
                   CUstream_st* stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return launch_kernel(kernel, config, args...);
}

template <class T, int kMost>
cudaError_t sum_spans(const AttentionParams& p, const DeviceShape& device, int64_t each,
                      CUstream_st* stream) {
  constexpr size_t kBytes = sizeof(AttentionShared<kMost>);
  const cudaError_t error = allow_dynamic<attention_kernel<T, kMost>>(device, int{kBytes});
  if (error != cudaSuccess) return error;
  const int64_t spans = core::attention_spans(p.length);
  const int64_t parts = (p.heads / p.groups * p.tokens + each - 1) / each;
  return launch(attention_kernel<T, kMost>, p.batch * p.groups * spans * parts, kBytes, stream, p,
                static_cast<unsigned>(spans), static_cast<unsigned>(parts), static_cast<int>(each));
}

template <class T>
Result attention_as(const AttentionParams& p, CUstream_st* stream) {
  const int64_t queries = p.batch * p.heads * p.tokens, spans = core::attention_spans(p.length);
  if (queries > 0x7fffffff / spans) {
    return {Result::Code::kInvalidArgument,
            "batch, heads, tokens, length: expected fewer queries and spans than 2^31, given more"};
  }
  const DeviceShape device = current_device();
  const int memory = forced_memory.load(std::memory_order_relaxed);
  const int forced = forced_groups.load(std::memory_order_relaxed);
  const bool has_room = (memory > 0 ? memory : device.shared_memory) >=
                        static_cast<int>(sizeof(AttentionShared<kManyQueries>));
  const int most =
      most_queries(has_room ? kManyQueries : kFewQueries, std::max(p.width, p.value_width));
  const int64_t each = queries_of_cta(p.heads / p.groups * p.tokens, p.batch * p.groups * spans,
                                      most, forced >= 0 ? forced : device.multiprocessors);
  cudaError_t error = each > kFewQueries ? sum_spans<T, kManyQueries>(p, device, each, stream)
                                         : sum_spans<T, kFewQueries>(p, device, each, stream);
  if (error == cudaSuccess && spans > 1)
    error = launch(merge_kernel<T>, queries, 0, stream, p, static_cast<unsigned>(spans));
  return result_of(error);
}

}  // namespace

Result attention(const AttentionParams& params, CUstream_st* stream) {
  if (params.dtype == DType::kFloat32) return attention_as<float>(params, stream);
  return attention_as<BFloat16>(params, stream);
}

}  // namespace polyspec::cuda
