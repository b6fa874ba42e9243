// Attention of a few queries over a cache, compiled for one instruction set: POLYSPEC_ISA is
// baseline, avx2 or avx512, and the build passes the matching compiler flags.
//
// Keys go by in blocks, and the weights of a query are relative to the largest score so far
// (Milakov and Gimelshein, arXiv 1805.02867). Blocks are counted from the first key and every sum
// has a fixed order, so that neither the other queries nor hidden keys change a bit. Spans of
// blocks are summed separately and then merged in order, on any thread.
#include <algorithm>

#include "core/layer_math.hpp"
#include "cpu/attention_tables.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/lanes.hpp"
#include "cpu/transpose.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

using cpu::AttentionQueries;
using cpu::kAttentionQueries;

constexpr int64_t kKeys = kAttentionKeys;
static_assert(kSumLanes == kLanes, "both share a layout");

// Queries that are multiplied at once, and lanes of values: as many sums as the registers hold.
#if defined(__AVX512F__)
constexpr int kAtOnce = 12, kValueLanes = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kAtOnce = 6, kValueLanes = 1;
#else
constexpr int kAtOnce = 4, kValueLanes = 1;
#endif

// The sums of queries; a query's sums follow each other in memory, by the width of the values.
struct Summed {
  float* sums;
  float (*weights)[kLanes];  // in all
  float* highest;            // score

  void clear(int64_t count, int64_t width) {
    std::fill(sums, sums + count * width, 0.0f);
    std::fill(weights[0], weights[0] + count * kLanes, 0.0f);
    std::fill(highest, highest + count, -kLargest);
  }
};
// `count` queries' part of memory for attention_kept.
Summed kept_at(float* kept, int64_t count, int64_t width) {
  float* const weights = kept + count * width;
  return {kept, reinterpret_cast<float (*)[kLanes]>(weights), weights + count * kLanes};
}

struct Whole {  // of a task
  alignas(64) float sums[kAttentionQueries * kAttentionWidth];
  alignas(64) float weights[kAttentionQueries][kLanes];
  float highest[kAttentionQueries];

  Summed view() { return {sums, weights, highest}; }
};

// The working memory of a task.
struct Scratch {
  alignas(64) float queries[kAttentionQueries * kAttentionWidth];
  alignas(64) float keys[kAttentionWidth][kLanes];  // of a tile
  alignas(64) float scores[kAttentionQueries][kKeys];
};
constexpr int64_t kFrames = 8 << 10;  // of the functions that work on it
static_assert(sizeof(Scratch) + 2 * sizeof(Whole) + kFrames <= kAttentionStack,
              "attention.hpp states what it takes");

// Scores of M queries with the 16 keys of a tile.
template <int M>
void multiply_keys(const float (*keys)[kLanes], const float* queries, int64_t width,
                   float (*scores)[kKeys]) {
  Sums sums[M];
  unrolled<M>([&](auto m) POLYSPEC_INLINE { sums[m] = no_sums(); });
  for (int64_t i = 0; i < width; ++i) {
    const Sums key = load(keys[i]);
    unrolled<M>([&](auto m)
                    POLYSPEC_INLINE { sums[m] = fused(key, queries[m * width + i], sums[m]); });
  }
  unrolled<M>([&](auto m) POLYSPEC_INLINE { store(scores[m], sums[m]); });
}

// sums[m] += weights[m] times `count` values, for M queries.
template <int M, class T>
void multiply_values(const T* values, int64_t stride, int64_t count, int64_t width,
                     const float (*weights)[kKeys], float* sums) {
  for (int64_t begin = 0; begin < width; begin += kValueLanes * kLanes) {
    float* const at = sums + begin;
    Sums own[M][kValueLanes];
    unrolled<M>([&](auto m) POLYSPEC_INLINE {
      unrolled<kValueLanes>([&](auto n)
                                POLYSPEC_INLINE { own[m][n] = load(at + m * width + n * kLanes); });
    });
    const T* value = values + begin;
    for (int64_t key = 0; key < count; ++key, value += stride) {
      Sums lanes[kValueLanes];
      unrolled<kValueLanes>([&](auto n) POLYSPEC_INLINE { lanes[n] = load(value + n * kLanes); });
      unrolled<M>([&](auto m) POLYSPEC_INLINE {
        unrolled<kValueLanes>([&](auto n) POLYSPEC_INLINE {
          own[m][n] = fused(lanes[n], weights[m][key], own[m][n]);
        });
      });
    }
    unrolled<M>([&](auto m) POLYSPEC_INLINE {
      unrolled<kValueLanes>([&](auto n)
                                POLYSPEC_INLINE { store(at + m * width + n * kLanes, own[m][n]); });
    });
  }
}

// body(M, first) for `count` queries, M of them at once.
template <int M, class Body>
void over_queries(int64_t count, int64_t first, const Body& body) {
  if constexpr (M > 0) {
    for (; count - first >= M; first += M) body(std::integral_constant<int, M>(), first);
    if (first < count) over_queries<M - 1>(count, first, body);
  }
}

// Turns a query's scores with `count` keys of a block, the first `seen` of them visible, filled up
// to whole tiles, into weights, and rescales the earlier sums.
template <class T>
void weigh(float* scores, const Summed& summed, int64_t m, int64_t count, int64_t seen,
           int64_t width, const T* mask) {
  if (mask != nullptr) {
    for (int64_t i = 0; i < seen; ++i)
      scores[i] = __builtin_fmaf(to_float(mask[i]), kLog2E, scores[i]);
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = seen; i < padded; ++i) scores[i] = -kInfinity;
  float high[kLanes];
  for (float& lane : high) lane = summed.highest[m];
  for (int64_t i = 0; i < padded; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l)
      high[l] = scores[i + l] > high[l] ? scores[i + l] : high[l];
  }
  float highest = high[0];
  for (const float lane : high) highest = lane > highest ? lane : highest;
  float* const weights = summed.weights[m];
  if (highest > summed.highest[m]) {
    const float factor = weight_of(summed.highest[m] - highest);
    float* const sums = summed.sums + m * width;
    for (int64_t i = 0; i < width; ++i) sums[i] *= factor;
    for (int64_t l = 0; l < kLanes; ++l) weights[l] *= factor;
    summed.highest[m] = highest;
  }
  for (int64_t i = 0; i < padded; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const float weight = weight_of(scores[i + l] - highest);
      scores[i + l] = weight;
      weights[l] += weight;
    }
  }
}

template <class T>
POLYSPEC_FN const T* row_of(const void* base, const int64_t (&stride)[3], int64_t row, int64_t head,
                            int64_t token) {
  return static_cast<const T*>(base) + row * stride[0] + head * stride[1] + token * stride[2];
}

template <class T>
void load_queries(const AttentionParams& p, const AttentionQueries& of, Scratch& scratch) {
  const int64_t share = p.heads / p.groups;
  const float factor = p.scale * kLog2E;
  for (int64_t m = 0; m < of.last - of.first; ++m) {
    const int64_t number = of.first + m;
    const T* const query = row_of<T>(p.query, p.query_stride, of.row,
                                     of.group * share + number / p.tokens, number % p.tokens);
    float* const to = scratch.queries + m * p.width;
    for (int64_t i = 0; i < p.width; ++i) to[i] = to_float(query[i]) * factor;
  }
}

template <class T>
const T* mask_of(const AttentionParams& p, const AttentionQueries& of, int64_t m, int64_t key) {
  return static_cast<const T*>(p.mask) + of.row * p.mask_stride[0] +
         (of.first + m) % p.tokens * p.mask_stride[1] + key;
}

// Whether the mask hides all of `keys` keys from `begin` on from all queries. Their weights would
// be 0, so that leaving them out changes no bit.
template <class T>
bool is_hidden(const AttentionParams& p, const AttentionQueries& of, int64_t begin, int64_t keys) {
  const int64_t count = std::min(of.last - of.first, p.tokens);  // heads have the same mask
  for (int64_t m = 0; m < count; ++m) {
    const T* const mask = mask_of<T>(p, of, m, begin);
    for (int64_t i = 0; i < keys; ++i) {
      if (!hides(to_float(mask[i]))) return false;
    }
  }
  return true;
}

// Sums up keys [first_key, length), as far as the span goes.
template <class T>
void sum_span(const AttentionParams& p, const AttentionQueries& of, int64_t first_key,
              Scratch& scratch, Summed summed) {
  const int64_t count = of.last - of.first;
  summed.clear(count, p.value_width);
  const int64_t length =
      std::min(longest_seen(p, of.row, of.first, of.last), first_key + kAttentionSpan);
  for (int64_t begin = first_key; begin < length; begin += kKeys) {
    const int64_t keys = std::min(kKeys, length - begin);
    if (p.mask != nullptr && is_hidden<T>(p, of, begin, keys)) continue;
    for (int64_t tile = 0; tile < keys; tile += kLanes) {
      const T* rows[kLanes];
      for (int64_t k = 0; k < kLanes; ++k) {
        const int64_t key = std::min(begin + tile + k, length - 1);
        rows[k] = row_of<T>(p.key, p.key_stride, of.row, of.group, key);
      }
      transpose(rows, p.width, scratch.keys);
      over_queries<kAtOnce>(count, 0, [&](auto several, int64_t m) POLYSPEC_INLINE {
        multiply_keys<several>(scratch.keys, scratch.queries + m * p.width, p.width,
                               reinterpret_cast<float (*)[kKeys]>(&scratch.scores[m][tile]));
      });
    }
    for (int64_t m = 0; m < count; ++m) {
      const T* const mask = p.mask == nullptr ? nullptr : mask_of<T>(p, of, m, begin);
      const int64_t seen =
          std::clamp<int64_t>(keys_seen(p, of.row, (of.first + m) % p.tokens) - begin, 0, keys);
      weigh(scratch.scores[m], summed, m, keys, seen, p.value_width, mask);
    }
    const T* const values = row_of<T>(p.value, p.value_stride, of.row, of.group, begin);
    over_queries<kAtOnce>(count, 0, [&](auto several, int64_t m) POLYSPEC_INLINE {
      multiply_values<several>(values, p.value_stride[2], keys, p.value_width, &scratch.scores[m],
                               summed.sums + m * p.value_width);
    });
  }
}

// Adds the sums of `next` after the sums of `all`. A span that a query does not see changes no sum.
void follow(const Summed& all, const Summed& next, int64_t count, int64_t width) {
  for (int64_t m = 0; m < count; ++m) {
    bool seen = false;
    for (const float lane : next.weights[m]) seen |= !(lane == 0.0f);
    if (!seen) continue;
    const float highest = std::max(all.highest[m], next.highest[m]);
    const float own = weight_of(all.highest[m] - highest);
    const float other = weight_of(next.highest[m] - highest);
    for (int64_t l = 0; l < kLanes; ++l)
      all.weights[m][l] = __builtin_fmaf(next.weights[m][l], other, all.weights[m][l] * own);
    float* const sums = all.sums + m * width;
    const float* const more = next.sums + m * width;
    for (int64_t i = 0; i < width; ++i) sums[i] = __builtin_fmaf(more[i], other, sums[i] * own);
    all.highest[m] = highest;
  }
}

template <class T>
void write(const AttentionParams& p, const AttentionQueries& of, const Summed& summed) {
  const int64_t share = p.heads / p.groups;
  for (int64_t m = 0; m < of.last - of.first; ++m) {
    const int64_t number = of.first + m;
    const int64_t head = of.group * share + number / p.tokens, token = number % p.tokens;
    float total = 0.0f;
    for (const float lane : summed.weights[m]) total += lane;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const float* const sums = summed.sums + m * p.value_width;
    T* const to =
        static_cast<T*>(p.out) + ((of.row * p.tokens + token) * p.heads + head) * p.value_width;
    for (int64_t i = 0; i < p.value_width; ++i) convert(sums[i] * inverse, to + i);
  }
}

template <class T>
void run_queries(const AttentionParams& p, const AttentionQueries& of) {
  Scratch scratch;
  Whole all, next;
  load_queries<T>(p, of, scratch);
  sum_span<T>(p, of, 0, scratch, all.view());
  for (int64_t key = kAttentionSpan; key < longest_seen(p, of.row, of.first, of.last);
       key += kAttentionSpan) {
    sum_span<T>(p, of, key, scratch, next.view());
    follow(all.view(), next.view(), of.last - of.first, p.value_width);
  }
  write<T>(p, of, all.view());
}

template <class T>
void run_one_span(const AttentionParams& p, const AttentionQueries& of, int64_t span, float* kept) {
  Scratch scratch;
  load_queries<T>(p, of, scratch);
  sum_span<T>(p, of, span * kAttentionSpan, scratch,
              kept_at(kept, of.last - of.first, p.value_width));
}

template <class T>
void merge_spans(const AttentionParams& p, const AttentionQueries& of, float* kept) {
  const int64_t count = of.last - of.first, each = count * attention_kept(p.value_width);
  const Summed all = kept_at(kept, count, p.value_width);
  for (int64_t span = 1; span < attention_spans(p.length); ++span)
    follow(all, kept_at(kept + span * each, count, p.value_width), count, p.value_width);
  write<T>(p, of, all);
}

// body(an element of the tensors' type).
template <class Body>
void by_type(DType dtype, const Body& body) {
  const FloatMode mode;
  if (dtype == DType::kFloat32) return body(float());
  body(BFloat16());
}

void run(const AttentionParams& params, const AttentionQueries& of) {
  by_type(params.dtype, [&](auto type) { run_queries<decltype(type)>(params, of); });
}
void run_span(const AttentionParams& params, const AttentionQueries& of, int64_t span,
              float* kept) {
  by_type(params.dtype, [&](auto type) { run_one_span<decltype(type)>(params, of, span, kept); });
}
void merge(const AttentionParams& params, const AttentionQueries& of, float* kept) {
  by_type(params.dtype, [&](auto type) { merge_spans<decltype(type)>(params, of, kept); });
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

const Attention POLYSPEC_COPY(kAttention) = {&POLYSPEC_CORE::run, &POLYSPEC_CORE::run_span,
                                             &POLYSPEC_CORE::merge, POLYSPEC_STRING(POLYSPEC_ISA)};

}  // namespace polyspec::cpu
