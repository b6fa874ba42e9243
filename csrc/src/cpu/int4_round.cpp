// Ranges of groups of weights, and the weights as numbers of 0 to 15 within them. A group stays in
// the first cache while all ranges are tried. Sums are computed in 16 lanes for any register width,
// so that the result is the same on every processor.
#include "cpu/int4_round.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/convert.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

using core::BFloat16;
using core::Float16;

constexpr int kLanes = 16;
constexpr int kRanges = 7;               // that are tried
constexpr float kLess = 0.05f;           // of the span, from one range to the next
constexpr float kFlat = 7.8886091e-31f;  // 2^-100: the weights are as good as alike below this span
constexpr float kRound = 12582912.0f;    // 1.5 * 2^23: adding it rounds, ties to even
constexpr int64_t kWeightsPerTask = int64_t{1} << 16;
constexpr int64_t kLargestGroup = 256;

struct Range {
  float scale = 1.0f, zero = 0.0f, inverse = 1.0f;
};

float exact_in(DType dtype, float value) {
  return dtype == DType::kFloat32 ? value : core::to_float(core::to_bfloat16(value));
}

// q - 8 of a weight.
inline float level_of(float weight, const Range& range) {
  float level = (weight - range.zero) * range.inverse;
  level = level > -8.0f ? level : -8.0f;
  level = level < 7.0f ? level : 7.0f;
  return (level + kRound) - kRound;
}

float sum_of(const float (&lanes)[kLanes]) {
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

float error_of(const float* weights, const float* importance, int64_t group, const Range& range) {
  float lanes[kLanes] = {};
  for (int64_t begin = 0; begin < group; begin += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float weight = weights[begin + l];
      const float error = level_of(weight, range) * range.scale + range.zero - weight;
      lanes[l] += error * error * importance[begin + l];
    }
  }
  return sum_of(lanes);
}

// The range with the least squared error.
Range range_of(const float* weights, const float* importance, int64_t group, DType dtype) {
  float lows[kLanes], highs[kLanes];
  std::copy(weights, weights + kLanes, lows);
  std::copy(weights, weights + kLanes, highs);
  for (int64_t begin = kLanes; begin < group; begin += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float weight = weights[begin + l];
      lows[l] = weight < lows[l] ? weight : lows[l];
      highs[l] = weight > highs[l] ? weight : highs[l];
    }
  }
  const float low = *std::min_element(lows, lows + kLanes);
  const float high = *std::max_element(highs, highs + kLanes);
  const float span = high - low, middle = (high + low) / 2.0f;
  Range best;
  best.zero = exact_in(dtype, middle);
  if (span < kFlat) return best;
  float least = 0.0f;
  for (int i = 0; i < kRanges; ++i) {
    Range range;
    range.scale = exact_in(dtype, span * (1.0f - kLess * static_cast<float>(i)) / 15.0f);
    range.zero = exact_in(dtype, middle + range.scale / 2.0f);
    range.inverse = 1.0f / range.scale;
    const float error = error_of(weights, importance, group, range);
    if (i == 0 || error < least) {
      least = error;
      best = range;
    }
  }
  return best;
}

// Row `row`; whether its weights are finite.
template <class T>
bool round_row(const Int4RoundParams& p, int64_t row) {
  const int64_t group = p.shape.group, groups = p.shape.inputs / group;
  const T* from = static_cast<const T*>(p.weights) + row * p.stride;
  float weights[kLargestGroup], importance[kLargestGroup];
  std::fill(importance, importance + group, 1.0f);
  bool finite = true;
  for (int64_t g = 0; g < groups; ++g, from += group) {
    float none = 0.0f;  // NaN where a weight is not finite
    for (int64_t k = 0; k < group; ++k) {
      weights[k] = core::to_float(from[k]);
      none += weights[k] * 0.0f;
    }
    const float* weigh = p.importance == nullptr ? importance : p.importance + g * group;
    const Range range = range_of(weights, weigh, group, p.shape.scale_dtype);
    finite = finite && none == 0.0f && std::isfinite(range.scale) && std::isfinite(range.zero);
    p.scales[row * groups + g] = range.scale;
    p.zeros[row * groups + g] = range.zero;
    uint8_t* values = p.values + row * p.shape.inputs + g * group;
    for (int64_t k = 0; k < group; ++k)
      values[k] = static_cast<uint8_t>(static_cast<int32_t>(level_of(weights[k], range)) + 8);
  }
  return finite;
}

bool round_row(const Int4RoundParams& params, int64_t row) {
  switch (params.dtype) {
    case DType::kFloat32:
      return round_row<float>(params, row);
    case DType::kBFloat16:
      return round_row<BFloat16>(params, row);
    default:
      return round_row<Float16>(params, row);
  }
}

}  // namespace

bool int4_round(const Int4RoundParams& params, const Executor& executor) {
  std::atomic<bool> finite{true};
  const int64_t each = std::max<int64_t>(1, kWeightsPerTask / params.shape.inputs);
  spread(executor, params.shape.outputs, each, [&](int64_t begin, int64_t end) {
    const core::FloatMode mode;
    for (; begin < end; ++begin) {
      if (!round_row(params, begin)) finite = false;
    }
  });
  return finite;
}

}  // namespace polyspec::cpu
