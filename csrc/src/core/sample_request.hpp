// polyspec::sample for one request, over any thread group.
#pragma once

#include "core/request.hpp"

namespace polyspec::POLYSPEC_CORE {

// T is the element type of the logits. Collective; rank 0 writes the outputs.
template <class T, Requests kind = Requests::kAny, class Group>
POLYSPEC_FN void sample_request(Group& group, const SampleParams& params, int64_t request) {
  const Row<T> row =
      row_at<T>(params.logits, params.dtype, request * params.logits_stride, params.vocab,
                kIsMasked<T> ? params.allowed + request * params.allowed_stride : nullptr);
  Filter<kind> filter;
  Draws draws;
  Emission emission;
  int32_t status = read_filter(params.sampling, request, &filter) |
                   read_draws(params.draw, request, request, 1, &draws);
  const int64_t node = value_for(params.node, request);
  if (node < 0 || node >= kDrawNodes || draws.position > INT64_MAX - params.ahead)
    status |= kStatusBadParameter;
  if (status == 0 && filter.greedy()) {
    status = greedy_emission(group, row, &emission);
  } else if (status == 0) {
    const int head = head_room(params.vocab);
    RowStatistics statistics;
    status = row_statistics(group, row, filter, head, &statistics);
    if (status == 0) {
      const uint64_t target =
          mul_high(draws.at(params.ahead, 0, Purpose::kSample, node), statistics.mass);
      emission.token = pick(group, row.n, token_mass(row, statistics, filter, head), target);
      emission.logprob = log_probability(row[emission.token], statistics, filter, head);
      emission.statistics = statistics;
    }
  }
  if (group.rank() == 0) {
    params.tokens[request * params.stride] = emission.token;
    if (params.next_ids != nullptr)
      params.next_ids[request] =
          emission.token < params.least_id ? params.least_id : emission.token;
    params.logprobs[request] = emission.logprob;
    params.status[request * params.stride] = status;
    if (params.statistics != nullptr)
      params.statistics[request * params.statistics_stride] = emission.statistics;
  }
}

}  // namespace polyspec::POLYSPEC_CORE
