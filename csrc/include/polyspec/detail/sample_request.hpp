// polyspec::sample for one request, over any thread group.
#pragma once

#include "polyspec/detail/request.hpp"

namespace polyspec::POLYSPEC_DETAIL {

// T is the element type of the logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void sample_request(Group& group, const SampleParams& params, int64_t request) {
  const Row<T> row = row_at<T>(params.logits, request * params.logits_stride, params.vocab);
  Filter filter;
  Draws draws;
  Emission emission;
  int32_t status =
      read_filter(params.sampling, request, &filter) | read_draws(params.draw, request, 1, &draws);
  if (status == 0 && filter.greedy()) {
    status = greedy_emission(group, row, &emission);
  } else if (status == 0) {
    const int head = head_room(params.vocab);
    RowLaw law;
    status = law_of(group, row, filter, head, &law);
    if (status == 0) {
      const uint64_t target = mul_high(draws.at(0, 0, Purpose::kSample), law.mass);
      emission.token = pick(group, row.n, law_weight(row, law, filter, head), target);
      emission.logprob = log_probability(row[emission.token], law, filter, head);
      emission.law = law;
    }
  }
  if (group.rank() == 0) {
    params.tokens[request] = emission.token;
    params.logprobs[request] = emission.logprob;
    params.status[request] = status;
    if (params.laws != nullptr) params.laws[request] = emission.law;
  }
}

}  // namespace polyspec::POLYSPEC_DETAIL
