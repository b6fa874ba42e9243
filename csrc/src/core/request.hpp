// One request's view of a batch: its parameters, checked, and its draws.
#pragma once

#include "core/distribution.hpp"
#include "polyspec/philox.hpp"
#include "polyspec/verify.hpp"

namespace polyspec::POLYSPEC_CORE {

// Parameters are read at a request's slot: its index in the batch, or the caller's slot.
template <class T>
POLYSPEC_FN T value_for(const PerRequest<T>& parameter, int64_t slot) {
  return parameter.data != nullptr ? parameter.data[slot] : parameter.value;
}

// Reads a request's sampling parameters; returns kStatusBadParameter or 0. NaNs fail every
// comparison.
template <Requests kind>
POLYSPEC_FN int32_t read_filter(const SamplingParams& sampling, int64_t slot,
                                Filter<kind>* filter) {
  *filter = {0.0f, 0.0f, 0, 1.0f, 0.0f};
  if constexpr (kind != Requests::kGreedy)
    filter->temperature = value_for(sampling.temperature, slot);
  if constexpr (Filter<kind>::kMayCut) {
    filter->top_k = value_for(sampling.top_k, slot);
    filter->top_p = value_for(sampling.top_p, slot);
    filter->min_p = value_for(sampling.min_p, slot);
  }
  if (filter->temperature > 0.0f && filter->temperature < kLeastTemperature)
    filter->temperature = kLeastTemperature;
  const bool good = filter->temperature >= 0.0f && filter->temperature <= kMostTemperature &&
                    filter->top_k >= 0 && filter->top_p >= 0.0f && filter->top_p <= 1.0f &&
                    filter->min_p >= 0.0f && filter->min_p <= 1.0f;
  filter->slope = good && !filter->greedy() ? slope_of(filter->temperature) : 0.0f;
  return good ? 0 : kStatusBadParameter;
}

POLYSPEC_CALLED uint64_t keyed_draw(uint64_t seed, int64_t position, int32_t level, int64_t round,
                                    Purpose purpose, int64_t node) {
  return draw_bits(seed, position, level, round, purpose, node);
}

// The draws of one request.
struct Draws {
  uint64_t seed;
  int64_t position;
  int64_t round;
  int32_t level;
  const uint64_t* bits;      // the request's injected draws, or nullptr
  const uint64_t* try_bits;  // draws of its tries, or nullptr

  // The draw for the token `offset` after `position`; `place` is its index among injected draws.
  POLYSPEC_FN uint64_t at(int64_t offset, int64_t place, Purpose purpose, int64_t node = 0) const {
    if (bits != nullptr) return bits[place];
    return keyed_draw(seed, position + offset, level, round, purpose, node);
  }

  // Whether corrections are tried by rejection, and the draws of a try: `which` is 0 for its token,
  // 1 for its test.
  POLYSPEC_FN bool tries() const { return bits == nullptr || try_bits != nullptr; }
  POLYSPEC_FN uint64_t of_try(int64_t offset, int64_t number, int64_t which) const {
    const int64_t node = 2 * number + which;
    if (try_bits != nullptr) return try_bits[node];
    return keyed_draw(seed, position + offset, level, round, Purpose::kTry, node);
  }
};

// `places` is the number of injected draws of a request.
POLYSPEC_FN int32_t read_draws(const DrawParams& draw, int64_t request, int64_t slot,
                               int64_t places, Draws* draws) {
  draws->seed = value_for(draw.seed, slot);
  draws->position = value_for(draw.position, slot);
  draws->round = value_for(draw.round, slot);
  draws->level = draw.level;
  draws->bits = draw.bits != nullptr ? draw.bits + request * places : nullptr;
  draws->try_bits = draw.bits != nullptr && draw.try_bits != nullptr
                        ? draw.try_bits + request * 2 * kResidualTries
                        : nullptr;
  const bool good =
      draws->position >= 0 && draws->round >= 0 && draws->round <= int64_t{0xffffffff};
  return good ? 0 : kStatusBadParameter;
}

// The last emission of a verification or sample: a token, its log-probability and its distribution.
struct Emission {
  int64_t token = -1;
  float logprob = kNan;
  RowStatistics statistics{0.0f, 0.0f, 0};
};

// Argmax of a row as an emission; error bits or 0. Collective.
template <class Group, class RowType>
POLYSPEC_FN int32_t greedy_emission(Group& group, const RowType& row, Emission* emission) {
  float max;
  const int32_t error = row_max(group, row, &max);
  if (error != 0) return error;
  emission->token = first_equal(group, row, max);
  emission->logprob = 0.0f;
  emission->statistics = {max, max, 1};
  return 0;
}

}  // namespace polyspec::POLYSPEC_CORE
