// What a decoder layer computes between its products, compiled for one instruction set:
// POLYSPEC_ISA is baseline, avx2 or avx512, and the build passes the matching compiler flags.
//
// The loops have no order but in the sum of squares, which is made in 16 lanes whatever the
// registers are: the result is the same on every processor.
#include "cpu/convert.hpp"
#include "cpu/copy.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/lanes.hpp"
#include "cpu/layer_tables.hpp"

namespace polyspec::POLYSPEC_CORE {
namespace {

constexpr float kLog2E = 1.44269504f, kLog2ELow = 1.92596303e-8f, kLn2 = 0.693147181f;

// As T holds it.
template <class T>
POLYSPEC_FN float rounded(float value) {
  T made;
  convert_output(value, &made);
  return to_float(made);
}

POLYSPEC_FN float sum_of(const float (&lanes)[kLanes]) {
  float half[kLanes / 2];
  for (int64_t i = 0; i < kLanes / 2; ++i) half[i] = lanes[i] + lanes[i + kLanes / 2];
  return ((half[0] + half[4]) + (half[1] + half[5])) + ((half[2] + half[6]) + (half[3] + half[7]));
}

// y may be x.
template <class T>
POLYSPEC_FN void norm_row(const T* x, const T* weight, int64_t n, float epsilon, T* y) {
  const int64_t whole = n / kLanes * kLanes;
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const float value = to_float(x[i + l]);
      lanes[l] += value * value;
    }
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += to_float(x[i]) * to_float(x[i]);
  const float mean = sum_of(lanes) / static_cast<float>(n);
  const float factor = 1.0f / __builtin_sqrtf(mean + epsilon);
  for (int64_t i = 0; i < n; ++i)
    convert_output(to_float(weight[i]) * rounded<T>(to_float(x[i]) * factor), y + i);
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
    convert_output(
        rounded<T>(first * to_float(cosine[i])) + rounded<T>(-second * to_float(sine[i])), to + i);
    convert_output(rounded<T>(second * to_float(cosine[i + half])) +
                       rounded<T>(first * to_float(sine[i + half])),
                   to + i + half);
  }
}

template <class T>
void turn_token(const RotaryParams& p, int64_t number) {
  const int64_t d = p.width, row = number / p.tokens, token = number % p.tokens;
  const int64_t at = (p.same_positions ? token : number) * d;
  const T* const cosine = static_cast<const T*>(p.cosine) + at;
  const T* const sine = static_cast<const T*>(p.sine) + at;
  const T* bias = static_cast<const T*>(p.bias);
  const T* x = static_cast<const T*>(p.x) + number * (p.heads + 2 * p.groups) * d;
  T changed[kRotaryWidth];
  const auto split = [&](void* out, int64_t heads, const void* norm, bool turns) {
    T* to = static_cast<T*>(out) + (row * heads * p.tokens + token) * d;
    for (int64_t head = 0; head < heads; ++head, x += d, to += p.tokens * d) {
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
        turn(from, cosine, sine, d, to);
      } else {
        memcpy(to, from, static_cast<size_t>(d) * sizeof(T));
      }
    }
  };
  split(p.query, p.heads, p.query_norm, true);
  split(p.key, p.groups, p.key_norm, true);
  split(p.value, p.groups, nullptr, false);
}

// exp(-|x|) decides on which side of 1 the exponential lies, so that none overflows.
POLYSPEC_FN float silu(float x) {
  const float size = bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu);
  const float exponent = size * kLog2E < 127.0f ? size * kLog2E : 127.0f;
  // What rounding to a float left out of the exponent.
  const float rest = __builtin_fmaf(size, kLog2E, -exponent) + size * kLog2ELow;
  const float power = exp2_in_range(-exponent);
  const float small = exponent < 127.0f ? __builtin_fmaf(power, -rest * kLn2, power) : 0.0f;
  return (x < 0.0f ? x * small : x) / (1.0f + small);
}

template <class T>
void gate_token(const GatedParams& p, int64_t token) {
  const int64_t n = p.width;
  const T* const gate = static_cast<const T*>(p.x) + token * 2 * n;
  const T* const up = gate + n;
  T* const y = static_cast<T*>(p.y) + token * n;
  for (int64_t i = 0; i < n; ++i)
    convert_output(rounded<T>(silu(to_float(gate[i]))) * to_float(up[i]), y + i);
}

template <class Params>
using OfToken = void (*)(const Params&, int64_t);

template <class Params, OfToken<Params> kFloat, OfToken<Params> kHalf>
void run(const Params& params, int64_t begin, int64_t end) {
  const FloatMode mode;
  const OfToken<Params> one = params.dtype == DType::kFloat32 ? kFloat : kHalf;
  for (; begin < end; ++begin) one(params, begin);
}

}  // namespace
}  // namespace polyspec::POLYSPEC_CORE

namespace polyspec::cpu {

namespace own = POLYSPEC_CORE;
const Layer POLYSPEC_COPY(kLayer) = {
    &own::run<RmsNormParams, own::norm_token<float>, own::norm_token<own::BFloat16>>,
    &own::run<RotaryParams, own::turn_token<float>, own::turn_token<own::BFloat16>>,
    &own::run<GatedParams, own::gate_token<float>, own::gate_token<own::BFloat16>>};

}  // namespace polyspec::cpu
