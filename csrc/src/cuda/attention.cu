// Attention of a few queries over a cache on CUDA: a CTA has queries that read the keys of one
// group, all of them up to 64, and a span of these keys. Where there are several spans, a second
// launch merges them in order.
//
// Keys and values pass through shared memory in tiles, 256 bytes of 128 of them, copied two tiles
// ahead. In float32 everything is fused multiply-adds, in the order of cpu/attention.cpp: a thread
// has the sums of a few keys with a few queries, and of two elements of values of a few queries. In
// bfloat16 tensor cores multiply, and add in an order that differs between devices.
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

// Sizes of a CTA of up to kMost queries of a type. With few it waits for memory, so that two CTAs
// share a multiprocessor.
template <class T, int kMost>
struct Form {
  static constexpr bool kFused = std::is_same_v<T, float>;
  static constexpr int kCtas = kMost > kFewQueries ? 1 : 2;
  static constexpr int kPad = kFused ? 0 : 8;  // so that eight rows lie in different banks
  static constexpr int wide(int width) { return most_queries(kMost, width) * (width + kPad); }
  static constexpr int kElements = std::max(wide(kAttentionWidth / 2), wide(kAttentionWidth));
};

template <class T, int kMost>
struct AttentionShared {
  alignas(16) T queries[Form<T, kMost>::kElements];
  // In bfloat16 weights overwrite a row of scores: all higher halves, then all lower halves.
  alignas(16) float scores[kMost][kKeys + Form<T, kMost>::kPad / 2];
  alignas(16) unsigned char tiles[kTiles][kKeys * kPitch];
  float lanes[kMost][kSumLanes];  // of the sums of weights
  float highest[kMost];           // score
  float factors[kMost];
  int head[kMost], token[kMost];
  int seen[kMost];  // keys of the span
  static_assert(most_queries(kMost, kAttentionWidth) * kAttentionWidth * sizeof(float) <=
                sizeof(tiles));  // of all sums at the end
};
static_assert(sizeof(AttentionShared<float, kFewQueries>) <= 99 << 10, "every device has room");
static_assert(2 * sizeof(AttentionShared<float, kFewQueries>) <= 226 << 10, "sm_90 for two CTAs");
static_assert(sizeof(AttentionShared<BFloat16, kFewQueries>) <=
              sizeof(AttentionShared<float, kFewQueries>));

// The queries of a CTA.
struct Queries {
  int64_t row, group;
  unsigned first;
  int count;
};

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
template <class T, int kMost>
__device__ __forceinline__ void begin_queries(AttentionShared<T, kMost>& shared,
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

// A warp loads its queries, several before it stores the first. In bfloat16 scores are scaled.
template <class T, int kMost>
__device__ __forceinline__ void load_queries(AttentionShared<T, kMost>& shared,
                                             const AttentionParams& p, const Queries& of) {
  constexpr int kAtOnce = kMost > kFewQueries ? 4 : 2, kEach = kAttentionWidth / kWarp;
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(p.width);
  const int pitch = width + Form<T, kMost>::kPad;
  const float factor = p.scale * core::kLog2E;
  POLYSPEC_ROLLED
  for (int first = threadIdx.x / kWarp; first < of.count; first += kAtOnce * kWarps) {
    T values[kAtOnce][kEach];
    POLYSPEC_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int m = first + j * kWarps;
      if (m >= of.count) break;
      const T* const query = static_cast<const T*>(p.query) + of.row * p.query_stride[0] +
                             shared.head[m] * p.query_stride[1] +
                             shared.token[m] * p.query_stride[2] + lane;
      POLYSPEC_UNROLL
      for (int i = 0; i < kEach; ++i) values[j][i] = i * kWarp < width ? query[i * kWarp] : T{};
    }
    POLYSPEC_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int m = first + j * kWarps;
      if (m >= of.count) break;
      POLYSPEC_UNROLL
      for (int i = 0; i < kEach; ++i) {
        if (i * kWarp >= width) break;
        if constexpr (Form<T, kMost>::kFused) values[j][i] *= factor;
        shared.queries[m * pitch + lane + i * kWarp] = values[j][i];
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

// run(integral_constant) of `count`, at most kMost.
template <int kMost, class Run>
__device__ __forceinline__ void with_count(int count, const Run& run) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, run);
  }
  run(std::integral_constant<int, kMost>());
}

// Sums of a thread in float32. It has the scores of two keys, the first and the one kKeyThreads
// later, with every kSplits-th query: the threads of a warp have the same queries. And it has two
// elements of the sums of values of some queries.
struct FusedSums {
  using Shared = AttentionShared<float, kFewQueries>;
  static constexpr int kKeysEach = 2, kKeyThreads = kKeys / kKeysEach;
  static constexpr int kSplits = kThreads / kKeyThreads, kScores = kFewQueries / kSplits;
  static constexpr int kSums = kFewQueries * kAttentionWidth / (2 * kThreads);
  static_assert(kKeyThreads % kWarp == 0);

  int key, query;        // the first
  int at, first, count;  // elements from `at` on, of queries
  float scores[kKeysEach][kScores];
  float sums[kSums][2] = {};

  __device__ __forceinline__ FusedSums(const AttentionParams& p, const Queries& of)
      : key(static_cast<int>(threadIdx.x) % kKeyThreads),
        query(static_cast<int>(threadIdx.x) / kKeyThreads) {
    const int pairs = static_cast<int>(p.value_width) / 2;
    const int split = static_cast<int>(threadIdx.x) / pairs, splits = kThreads / pairs;
    at = 2 * (static_cast<int>(threadIdx.x) % pairs);
    const int each = (of.count + splits - 1) / splits, left = of.count - split * each;
    first = split * each;
    count = split >= splits || left < 0 ? 0 : left < each ? left : each;
  }

  // Adds products of keys with queries over `bytes` of a tile, part `part` of a row.
  __device__ __forceinline__ void add_scores(const Shared& shared, const AttentionParams& p,
                                             const Queries& of, const unsigned char* tile, int part,
                                             int bytes) {
    for (int k = 0; part == 0 && k < kKeysEach; ++k) {
      for (int j = 0; j < kScores; ++j) scores[k][j] = 0.0f;
    }
    if (query >= of.count) return;
    const int width = static_cast<int>(p.width);
    const float* const queries = shared.queries + part * (kRowBytes / 4) + query * width;
    with_count<kScores>((of.count - query + kSplits - 1) / kSplits, [&](auto mine) {
      multiply<mine>(queries, width, tile + key * kPitch, bytes / 16);
    });
  }
  __device__ __forceinline__ void store_scores(Shared& shared, const AttentionParams&,
                                               const Queries& of) const {
    POLYSPEC_UNROLL
    for (int j = 0; j < kScores; ++j) {
      const int m = query + j * kSplits;
      if (m >= of.count) break;
      POLYSPEC_UNROLL
      for (int k = 0; k < kKeysEach; ++k) shared.scores[m][key + k * kKeyThreads] = scores[k][j];
    }
  }
  // Adds weights times `keys` values, and times the zeros after them, where this thread has part
  // `part` of a row.
  __device__ __forceinline__ void add_values(const Shared& shared, const Queries&,
                                             const unsigned char* tile, int part, int keys) {
    const int byte = at * static_cast<int>(sizeof(float)) - part * kRowBytes;
    if (byte < 0 || byte >= kRowBytes || count == 0) return;
    POLYSPEC_UNROLL
    for (int j = 0; j < kSums; ++j) {
      if (j >= count) break;
      for (int i = 0; i < 2; ++i) sums[j][i] *= shared.factors[first + j];
    }
    with_count<kSums>(count, [&](auto mine) { accumulate<mine>(shared, tile + byte, keys); });
  }
  // As rows of value_width.
  __device__ __forceinline__ void store_sums(float* to, int value_width, const Queries&) const {
    POLYSPEC_UNROLL
    for (int j = 0; j < kSums; ++j) {
      if (j >= count) break;
      for (int i = 0; i < 2; ++i) to[(first + j) * value_width + at + i] = sums[j][i];
    }
  }

 private:
  template <int kMine>
  __device__ __forceinline__ void multiply(const float* queries, int width,
                                           const unsigned char* tile, int vectors) {
    const auto keys = [&](int v, float (&to)[kKeysEach][4]) {
      POLYSPEC_UNROLL
      for (int k = 0; k < kKeysEach; ++k)
        load_four(reinterpret_cast<const float*>(tile + k * kKeyThreads * kPitch) + 4 * v, to[k]);
    };
    float vector[kKeysEach][4];
    keys(0, vector);
    POLYSPEC_ROLLED  // code beyond the instruction cache would cost more
        for (int v = 0; v < vectors; ++v) {
      float next[kKeysEach][4];
      keys(v + 1 < vectors ? v + 1 : v, next);
      POLYSPEC_UNROLL
      for (int j = 0; j < kMine; ++j) {
        float of_query[4];
        load_four(queries + j * kSplits * width + v * 4, of_query);
        POLYSPEC_UNROLL
        for (int i = 0; i < 4; ++i) {
          POLYSPEC_UNROLL
          for (int k = 0; k < kKeysEach; ++k)
            scores[k][j] = __builtin_fmaf(vector[k][i], of_query[i], scores[k][j]);
        }
      }
      POLYSPEC_UNROLL
      for (int k = 0; k < kKeysEach; ++k) {
        for (int i = 0; i < 4; ++i) vector[k][i] = next[k][i];
      }
    }
  }

  template <int kMine>
  __device__ __forceinline__ void accumulate(const Shared& shared, const unsigned char* tile,
                                             int keys) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
#pragma unroll(kMine < 4 ? 4 / kMine : 1)
#endif
    for (int of = 0; of < keys; of += 4) {
      float value[4][2];
      POLYSPEC_UNROLL
      for (int k = 0; k < 4; ++k) {
        const auto* const from = reinterpret_cast<const uint64_t*>(tile + (of + k) * kPitch);
        value[k][0] = core::bit_cast<float>(static_cast<uint32_t>(*from));
        value[k][1] = core::bit_cast<float>(static_cast<uint32_t>(*from >> 32));
      }
      POLYSPEC_UNROLL
      for (int j = 0; j < kMine; ++j) {
        float weight[4];
        load_four(&shared.scores[first + j][of], weight);
        POLYSPEC_UNROLL
        for (int k = 0; k < 4; ++k) {
          for (int i = 0; i < 2; ++i)
            sums[j][i] = __builtin_fmaf(value[k][i], weight[k], sums[j][i]);
        }
      }
    }
  }
};

// Sums of a warp in bfloat16, by products of matrices of 16 rows with 8 queries. For scores the
// rows are 16 keys of a block, for sums 16 elements of the values in a tile. A product's sum
// depends on its row and its query alone, so that other queries change no bit.
template <int kMost>
struct TensorSums {
  using Shared = AttentionShared<BFloat16, kMost>;
  static constexpr int kColumns = kMost / 8;  // products of a row of 16
  static constexpr int kOfPart = most_queries(kMost, kAttentionWidth) / 8;  // where there are two
  static constexpr int kSums = std::max(kColumns, 2 * kOfPart);

  int warp, lane;
  int value_bytes;
  float scores[kColumns][4];
  float sums[kSums][4] = {};

  __device__ __forceinline__ TensorSums(const AttentionParams& p, const Queries&)
      : warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        value_bytes(static_cast<int>(p.value_width) * 2) {}

  __device__ __forceinline__ void add_scores(const Shared& shared, const AttentionParams& p,
                                             const Queries& of, const unsigned char* tile, int part,
                                             int bytes) {
    for (int n = 0; part == 0 && n < kColumns; ++n) {
      for (int j = 0; j < 4; ++j) scores[n][j] = 0.0f;
    }
    const int pitch = 2 * (static_cast<int>(p.width) + Form<BFloat16, kMost>::kPad);
    const unsigned char* const keys =
        tile + (warp * 16 + lane % 16) * kPitch + lane / 16 * 16;  // of lane's row of a matrix
    const unsigned char* const queries = reinterpret_cast<const unsigned char*>(shared.queries) +
                                         (lane / 16 * 8 + lane % 8) * pitch + part * kRowBytes +
                                         lane / 8 % 2 * 16;
    POLYSPEC_ROLLED
    for (int byte = 0; byte < bytes; byte += 32) {  // 16 elements
      uint32_t key[4];
      load_matrices<false>(key, keys + byte);
      POLYSPEC_UNROLL
      for (int n = 0; n < kColumns; n += 2) {
        if (n * 8 >= of.count) break;
        uint32_t query[4];
        load_matrices<false>(query, queries + n * 8 * pitch + byte);
        multiply<BFloat16>(scores[n], key, query[0], query[1]);
        multiply<BFloat16>(scores[n + 1], key, query[2], query[3]);
      }
    }
  }
  __device__ __forceinline__ void store_scores(Shared& shared, const AttentionParams& p,
                                               const Queries& of) const {
    const float factor = p.scale * core::kLog2E;
    for_each(of, [&](int n, int j, int m, int row) {
      shared.scores[m][warp * 16 + row] = scores[n][j] * factor;
    });
  }
  __device__ __forceinline__ void add_values(const Shared& shared, const Queries& of,
                                             const unsigned char* tile, int part, int) {
    if (part * kRowBytes + warp * 32 >= value_bytes) return;
    if (part == 0)
      accumulate<0, kColumns>(shared, of, tile);
    else
      accumulate<kOfPart, kOfPart>(shared, of, tile);
  }
  __device__ __forceinline__ void store_sums(float* to, int value_width, const Queries& of) const {
    POLYSPEC_UNROLL
    for (int part = 0; part < 2; ++part) {
      if (part * kRowBytes + warp * 32 >= value_bytes) return;
      for_each(of, [&](int n, int j, int m, int row) {
        if (part == 0 || n < kOfPart)
          to[m * value_width + part * (kRowBytes / 2) + warp * 16 + row] =
              sums[part == 0 ? n : (kOfPart + n) % kSums][j];
      });
    }
  }

 private:
  // run(product, number of its sum, query, row) of this lane's sums.
  template <class Run>
  __device__ __forceinline__ void for_each(const Queries& of, const Run& run) const {
    POLYSPEC_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      POLYSPEC_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int m = n * 8 + lane % 4 * 2 + j % 2;
        if (m < of.count) run(n, j, m, lane / 4 + j / 2 * 8);
      }
    }
  }

  template <int kFirst, int kCount>
  __device__ __forceinline__ void accumulate(const Shared& shared, const Queries& of,
                                             const unsigned char* tile) {
    POLYSPEC_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const int m = n * 8 + lane % 4 * 2;
      if (m >= of.count) break;
      for (int j = 0; j < 4; ++j)
        sums[kFirst + n][j] *= shared.factors[m + j % 2 < of.count ? m + j % 2 : m];
    }
    const unsigned char* const values =
        tile + (lane / 16 * 8 + lane % 8) * kPitch + warp * 32 + lane / 8 % 2 * 16;
    const unsigned char* const weights =
        reinterpret_cast<const unsigned char*>(shared.scores[lane / 16 * 8 + lane % 8]) +
        lane / 8 % 2 * 16;
    POLYSPEC_ROLLED
    for (int key = 0; key < kKeys; key += 16) {
      uint32_t value[4];
      load_matrices<true>(value, values + key * kPitch);
      POLYSPEC_UNROLL
      for (int n = 0; n < kCount; n += 2) {
        if (n * 8 >= of.count) break;
        POLYSPEC_UNROLL
        for (int half = 0; half < 2; ++half) {  // the higher, then the lower bits of weights
          uint32_t weight[4];
          load_matrices<false>(weight, weights +
                                           n * 8 * static_cast<int>(sizeof(shared.scores[0])) +
                                           half * 2 * kKeys + key * 2);
          multiply<BFloat16>(sums[kFirst + n], value, weight[0], weight[1]);
          multiply<BFloat16>(sums[kFirst + n + 1], value, weight[2], weight[3]);
        }
      }
    }
  }
};

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
template <class T, int kMost>
__device__ __forceinline__ void weigh(AttentionShared<T, kMost>& shared, int m, int seen, int count,
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
  if constexpr (!Form<T, kMost>::kFused) __syncwarp();  // all lanes have their scores
  POLYSPEC_UNROLL
  for (int u = 0; u < kKeys / kWarp; ++u) {
    const float weight = core::weight_of(scores[u] - highest);
    if constexpr (Form<T, kMost>::kFused) {
      shared.scores[m][lane + u * kWarp] = lane + u * kWarp < count ? weight : -0.0f;
    } else {
      BFloat16* const halves = reinterpret_cast<BFloat16*>(shared.scores[m]) + lane + u * kWarp;
      core::convert(weight, halves);
      core::convert(weight - to_float(halves[0]), halves + kKeys);
    }
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
__device__ __forceinline__ void weigh_block(AttentionShared<T, kMost>& shared,
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

// A CTA takes `each` of the queries that read the same keys. Grid: x over parts of these queries,
// spans, heads of keys and rows, parts fastest: while keys are read for one, another finds them in
// the second-level cache.
template <class T, int kMost>
__global__ void __launch_bounds__(kThreads, Form<T, kMost>::kCtas)
    attention_kernel(const __grid_constant__ AttentionParams p, unsigned spans, unsigned parts,
                     int each) {
  launch_dependents();
  using Shared = AttentionShared<T, kMost>;
  using Sums = std::conditional_t<Form<T, kMost>::kFused, FusedSums, TensorSums<kMost>>;
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
  load_queries(shared, p, of);
  Sums sums(p, of);
  int slot = 0;
  POLYSPEC_ROLLED
  for (int begin = 0; begin < tiles.end; begin += kKeys) {
    const int count = tiles.end - begin < kKeys ? tiles.end - begin : kKeys;
    POLYSPEC_ROLLED
    for (int part = 0; part < tiles.of_keys; ++part, slot = (slot + 1) % kTiles) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the keys are there, and the queries
      const int bytes = tiles.key_bytes - part * kRowBytes;
      sums.add_scores(shared, p, of, shared.tiles[slot], part,
                      bytes < kRowBytes ? bytes : kRowBytes);
      if (part + 1 == tiles.of_keys) sums.store_scores(shared, p, of);
      __syncthreads();  // the keys are read, and the scores there
      tiles.load(shared.tiles);
    }
    weigh_block<T>(shared, p, of, first_key, begin, count);
    POLYSPEC_ROLLED
    for (int part = 0; part < tiles.of_block - tiles.of_keys; ++part, slot = (slot + 1) % kTiles) {
      wait_for_batches<kTiles - 1>();
      __syncthreads();  // the values are there, and the weights
      sums.add_values(shared, of, shared.tiles[slot], part, count);
      __syncthreads();  // the values are read
      tiles.load(shared.tiles);
    }
  }

  const int value_width = static_cast<int>(p.value_width);
  float* const rows = reinterpret_cast<float*>(shared.tiles);  // which all threads have read
  sums.store_sums(rows, value_width, of);
  __syncthreads();  // the sums are there
  const int lane = threadIdx.x % kWarp;
  POLYSPEC_ROLLED
  for (int m = threadIdx.x / kWarp; m < of.count; m += kWarps) {
    const float* const from = rows + m * value_width;
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
  constexpr size_t kBytes = sizeof(AttentionShared<T, kMost>);
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
  constexpr int kMost = Form<T, kFewQueries>::kFused ? kFewQueries : kManyQueries;
  const bool has_room = (memory > 0 ? memory : device.shared_memory) >=
                        static_cast<int>(sizeof(AttentionShared<T, kMost>));
  const int most = most_queries(has_room ? kMost : kFewQueries, std::max(p.width, p.value_width));
  const int64_t each = queries_of_cta(p.heads / p.groups * p.tokens, p.batch * p.groups * spans,
                                      most, forced >= 0 ? forced : device.multiprocessors);
  cudaError_t error = each > kFewQueries ? sum_spans<T, kMost>(p, device, each, stream)
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
