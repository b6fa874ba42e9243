// The operators of a decoder layer between its products, compiled for one instruction set:
// POLYSPEC_ISA is baseline, avx2 or avx512, and the build passes the matching compiler flags.
//
// The loops have no order but in the sum of squares, which is computed in 64 lanes for any register
// width: the result is the same on every processor.
#include "core/kv_index.hpp"
#include "core/layer_math.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/layer_tables.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

// y may be x.
template <class T>
POLYSPEC_FN void norm_row(const T* x, const T* weight, int64_t n, float epsilon, T* y) {
  const int64_t whole = n / kNormLanes * kNormLanes;
  float squares[kNormLanes] = {}, lanes[kSumLanes];
  for (int64_t i = 0; i < whole; i += kNormLanes) {
    for (int64_t l = 0; l < kNormLanes; ++l) {
      const float value = to_float(x[i + l]);
      squares[l] += value * value;
    }
  }
  for (int64_t i = whole; i < n; ++i) squares[i - whole] += to_float(x[i]) * to_float(x[i]);
  for (int64_t l = 0; l < kSumLanes; ++l)
    lanes[l] = (squares[l] + squares[l + 32]) + (squares[l + 16] + squares[l + 48]);
  const float factor = norm_factor(lanes, n, epsilon);
  for (int64_t i = 0; i < n; ++i)
    convert_output(normed<T>(to_float(weight[i]), to_float(x[i]), factor), y + i);
}

template <class T>
void norm_token(const RmsNormParams& p, int64_t token) {
  const int64_t n = p.width;
  const T* x = static_cast<const T*>(p.x) + token * n;
  if (p.residual != nullptr) {
    const T* const residual = static_cast<const T*>(p.residual) + token * n;
    T* const sum = static_cast<T*>(p.sum) + token * n;
    for (int64_t i = 0; i < n; ++i) convert_output(to_float(x[i]) + to_float(residual[i]), sum + i);
    x = sum;
  }
  norm_row(x, static_cast<const T*>(p.weight), n, p.epsilon, static_cast<T*>(p.y) + token * n);
}

template <class T>
POLYSPEC_FN void turn(const T* x, const T* cosine, const T* sine, int64_t width, T* to) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[i + half]);
    convert_output(turned<T>(first, -second, to_float(cosine[i]), to_float(sine[i])), to + i);
    convert_output(turned<T>(second, first, to_float(cosine[i + half]), to_float(sine[i + half])),
                   to + i + half);
  }
}

// The outputs of a token's heads, one `step` apart; nullptr: none.
template <class T>
struct HeadsAt {
  T* data;
  int64_t step;
};

template <class T>
POLYSPEC_FN void split_token(const RotaryParams& p, int64_t number, HeadsAt<T> query,
                             HeadsAt<T> key, HeadsAt<T> value) {
  const int64_t d = p.width, at = angles_at(p, number / p.tokens, number % p.tokens);
  const T* const cosine = static_cast<const T*>(p.cosine) + at;
  const T* const sine = static_cast<const T*>(p.sine) + at;
  const T* bias = static_cast<const T*>(p.bias);
  const T* x = static_cast<const T*>(p.x) + number * (p.heads + 2 * p.groups) * d;
  T changed[kRotaryWidth];
  const auto split = [&](HeadsAt<T> to, int64_t heads, const void* norm, bool turns) {
    if (to.data == nullptr) {
      x += heads * d;
      if (bias != nullptr) bias += heads * d;
      return;
    }
    for (int64_t head = 0; head < heads; ++head, x += d, to.data += to.step) {
      const T* from = x;
      if (bias != nullptr) {
        for (int64_t i = 0; i < d; ++i)
          convert_output(to_float(x[i]) + to_float(bias[i]), changed + i);
        from = changed;
        bias += d;
      }
      if (norm != nullptr) {
        norm_row(from, static_cast<const T*>(norm), d, p.epsilon, changed);
        from = changed;
      }
      if (turns) {
        turn(from, cosine, sine, d, to.data);
      } else {
        memcpy(to.data, from, static_cast<size_t>(d) * sizeof(T));
      }
    }
  };
  split(query, p.heads, p.query_norm, true);
  split(key, p.groups, p.key_norm, true);
  split(value, p.groups, nullptr, false);
}

// In tensors [b, heads, t, d].
template <class T>
POLYSPEC_FN HeadsAt<T> heads_at(void* data, const RotaryParams& p, int64_t heads, int64_t number) {
  const int64_t row = number / p.tokens, token = number % p.tokens;
  return {static_cast<T*>(data) + (row * heads * p.tokens + token) * p.width, p.tokens * p.width};
}

template <class T>
void turn_token(const RotaryParams& p, int64_t number) {
  split_token<T>(p, number, heads_at<T>(p.query, p, p.heads, number),
                 heads_at<T>(p.key, p, p.groups, number),
                 heads_at<T>(p.value, p, p.groups, number));
}

template <class T>
void append_token(const RotaryAppendParams& p, int64_t number) {
  const int64_t row = number / p.turn.tokens, token = number % p.turn.tokens;
  const NewTokens in = new_tokens(p);
  const RowAppend plan = row_append(in, row, p.capacity);
  if (token == 0) p.status[row] |= plan.status;
  const auto slot = [&](const KvCache& cache) -> HeadsAt<T> {
    if (token >= plan.count) return {nullptr, 0};
    const int64_t at = offset_of(cache.stride, row, 0, plan.begin + token);
    return {static_cast<T*>(cache.data) + at, cache.stride[1]};
  };
  split_token<T>(p.turn, number, heads_at<T>(p.turn.query, p.turn, p.turn.heads, number),
                 slot(p.keys), slot(p.values));
}

template <class T>
void gate_token(const GatedParams& p, int64_t token) {
  const int64_t n = p.width;
  const T* const gate = static_cast<const T*>(p.x) + token * 2 * n;
  const T* const up = gate + n;
  T* const y = static_cast<T*>(p.y) + token * n;
  for (int64_t i = 0; i < n; ++i)
    convert_output(gated_value<T>(to_float(gate[i]), to_float(up[i])), y + i);
}

template <class Params>
POLYSPEC_FN DType dtype_of(const Params& params) {
  return params.dtype;
}
POLYSPEC_FN DType dtype_of(const RotaryAppendParams& params) { return params.turn.dtype; }

template <class Params>
using OfToken = void (*)(const Params&, int64_t);

template <class Params, OfToken<Params> kFloat, OfToken<Params> kHalf>
void run(const Params& params, int64_t begin, int64_t end) {
  const FloatMode mode;
  const OfToken<Params> one = dtype_of(params) == DType::kFloat32 ? kFloat : kHalf;
  for (; begin < end; ++begin) one(params, begin);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

namespace own = POLYSPEC_CORE;
const Layer POLYSPEC_COPY(kLayer) = {
    &own::run<RmsNormParams, own::norm_token<float>, own::norm_token<own::BFloat16>>,
    &own::run<RotaryParams, own::turn_token<float>, own::turn_token<own::BFloat16>>,
    &own::run<RotaryAppendParams, own::append_token<float>, own::append_token<own::BFloat16>>,
    &own::run<GatedParams, own::gate_token<float>, own::gate_token<own::BFloat16>>};

}  // namespace polyspec::cpu
