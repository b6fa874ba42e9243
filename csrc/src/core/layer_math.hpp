// The arithmetic of layer.hpp and attention.hpp, value by value, shared by the CPU and CUDA, so
// that both give the same bits.
#pragma once

#include "core/convert.hpp"
#include "core/kv_index.hpp"
#include "polyspec/attention.hpp"
#include "polyspec/layer.hpp"
#include "polyspec/philox.hpp"  // POLYSPEC_HD

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kSumLanes = 16;        // sums by themselves, which follow each other in memory
constexpr int64_t kNormLanes = 64;       // of a sum of squares, which become kSumLanes
constexpr int64_t kAttentionKeys = 128;  // of a block
static_assert(kAttentionSpan % kAttentionKeys == 0, "spans are whole blocks");
constexpr float kLog2E = 1.44269504f, kLog2ELow = 1.92596303e-8f, kLn2 = 0.693147181f;

// As T holds it.
template <class T>
POLYSPEC_FN float rounded(float value) {
  T made;
  convert_output(value, &made);
  return to_float(made);
}

POLYSPEC_FN float sum_of(const float (&lanes)[kSumLanes]) {
  float half[kSumLanes / 2];
  POLYSPEC_UNROLL
  for (int64_t i = 0; i < kSumLanes / 2; ++i) half[i] = lanes[i] + lanes[i + kSumLanes / 2];
  return ((half[0] + half[4]) + (half[1] + half[5])) + ((half[2] + half[6]) + (half[3] + half[7]));
}

POLYSPEC_FN float root_of(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// 1 / sqrt(mean(x^2) + epsilon) of n squares. Of kNormLanes sums, i with the i-th of every 64
// squares, `lanes` has (i + (i + 32)) + ((i + 16) + (i + 48)).
POLYSPEC_FN float norm_factor(const float (&lanes)[kSumLanes], int64_t n, float epsilon) {
  return 1.0f / root_of(sum_of(lanes) / static_cast<float>(n) + epsilon);
}

template <class T>
POLYSPEC_FN float normed(float weight, float x, float factor) {
  return weight * rounded<T>(x * factor);
}

template <class T>
POLYSPEC_FN float turned(float x, float other, float cosine, float sine) {
  return rounded<T>(x * cosine) + rounded<T>(other * sine);
}

// Where the angles of a row's token begin.
POLYSPEC_FN int64_t angles_at(const RotaryParams& p, int64_t row, int64_t token) {
  int64_t at = p.positions[row * p.position_stride[0] + token * p.position_stride[1]];
  at = at < 0 ? 0 : at < p.angles ? at : p.angles;  // no sum overflows
  at += token * p.position_step;
  return (at < p.angles ? at : p.angles - 1) * p.width;
}

// exp(-|x|) decides on which side of 1 the exponential lies, so that none overflows.
POLYSPEC_FN float silu(float x) {
  const float size = bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu);
  const float exponent = size * kLog2E < 127.0f ? size * kLog2E : 127.0f;
  // The rounding error of the exponent.
  const float rest = __builtin_fmaf(size, kLog2E, -exponent) + size * kLog2ELow;
  const float power = exp2_in_range(-exponent);
  const float small = exponent < 127.0f ? __builtin_fmaf(power, -rest * kLn2, power) : 0.0f;
  return (x < 0.0f ? x * small : x) / (1.0f + small);
}

template <class T>
POLYSPEC_FN float gated_value(float gate, float up) {
  return rounded<T>(silu(gate)) * up;
}

// The append parameters of rotary_append's keys and values.
POLYSPEC_FN NewTokens new_tokens(const RotaryAppendParams& p) {
  NewTokens in;
  in.batch = p.turn.batch;
  in.tokens = p.turn.tokens;
  in.lengths = p.lengths;
  in.counts = p.counts;
  return in;
}

// Writes elements i and i + half of a head, turned by the angles of `at` on.
template <class T>
POLYSPEC_FN void turn_pair(float first, float second, const RotaryParams& p, int64_t at, int64_t i,
                           T* to) {
  const T* const cosine = static_cast<const T*>(p.cosine) + at;
  const T* const sine = static_cast<const T*>(p.sine) + at;
  const int64_t j = i + p.width / 2;
  convert_output(turned<T>(first, -second, to_float(cosine[i]), to_float(sine[i])), to + i);
  convert_output(turned<T>(second, first, to_float(cosine[j]), to_float(sine[j])), to + j);
}

// Where a head of a row's token goes: a query's to [b, heads, t, d], and one of keys or of values,
// which come after, to its cache; nullptr: padding.
template <class T>
POLYSPEC_FN T* head_of(const RotaryAppendParams& p, const RowAppend& plan, int64_t row,
                       int64_t token, int64_t head) {
  const RotaryParams& turn = p.turn;
  if (head < turn.heads) {
    return static_cast<T*>(turn.query) +
           ((row * turn.heads + head) * turn.tokens + token) * turn.width;
  }
  if (token >= plan.count) return nullptr;
  const bool key = head < turn.heads + turn.groups;
  const KvCache& cache = key ? p.keys : p.values;
  const int64_t group = head - turn.heads - (key ? 0 : turn.groups);
  return static_cast<T*>(cache.data) + offset_of(cache.stride, row, group, plan.begin + token);
}

// ---- attention ----

POLYSPEC_HD int64_t attention_spans(int64_t length) {
  return (length + kAttentionSpan - 1) / kAttentionSpan;
}
// Floats of a query's sums over a span: its sums, its weights in lanes, and its highest score.
POLYSPEC_HD constexpr int64_t attention_kept(int64_t value_width) {
  return value_width + kSumLanes + 1;
}

// 2^x for x <= 0: 0 below -127, and NaN for a NaN.
POLYSPEC_FN float weight_of(float x) {
  const float exponent = x < -127.0f ? -127.0f : x;
  return __builtin_fmaf(exponent, 0.0f, exp2_in_range(exponent));  // NaNs stay
}

// Whether a mask's value makes the weight of a key 0 for any score: the lowest value of float and
// of bfloat16, and -infinity.
POLYSPEC_FN bool hides(float mask) { return mask * kLog2E < -kLargest; }

// How many keys a token of a row sees, but for the mask.
POLYSPEC_FN int64_t keys_seen(const AttentionParams& p, int64_t row, int64_t token) {
  if (p.lengths != nullptr) {
    // (A length that is no length sees nothing, or all.)
    const int64_t before = p.lengths[row];
    if (before >= p.length) return p.length;
    const int64_t seen = before < 0 ? 0 : before + token + 1;
    return seen < p.length ? seen : p.length;
  }
  return p.causal ? p.length - p.tokens + token + 1 : p.length;
}
// The most that one of the queries [first, last) of a group does: query number i is that of token
// i % tokens.
template <class Index>
POLYSPEC_FN int64_t longest_seen(const AttentionParams& p, int64_t row, Index first, Index last) {
  const Index tokens = static_cast<Index>(p.tokens);
  const bool whole = first / tokens != (last - 1) / tokens;  // a head's last token among them
  return keys_seen(p, row, whole ? tokens - 1 : (last - 1) % tokens);
}

}  // namespace polyspec::POLYSPEC_CORE
