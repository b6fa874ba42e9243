// polyspec::verify for one request, over any thread group.
#pragma once

#include "polyspec/detail/verify_block.hpp"

namespace polyspec::POLYSPEC_DETAIL {

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_request(Group& group, const VerifyParams& params, int64_t request) {
  Block<T> block{params, request, params.draft_len, {}, {}};
  Verdict verdict;
  verdict.status = read_filter(params.sampling, request, &block.filter) |
                   read_draws(params.draw, request, params.draft_len + 1, &block.draws);
  if (params.draft_lengths != nullptr) {
    block.length = params.draft_lengths[request];
    if (block.length < 0 || block.length > params.draft_len) verdict.status |= kStatusBadLength;
  }
  if (verdict.status == 0) {
    if (block.filter.greedy()) {
      verdict = verify_greedy(group, block);
    } else if (params.rule == Rule::kToken) {
      verdict = verify_token(group, block);
    } else {
      verdict = verify_block(group, block);
    }
  }
  if (group.rank() != 0) return;
  const bool failed = (verdict.status & kErrorMask) != 0;
  params.num_accepted[request] = verdict.accepted;
  params.status[request] = verdict.status;
  if (!failed) {
    block.write(verdict.accepted, verdict.last.token, verdict.last.logprob, verdict.last.law);
    block.pad(verdict.accepted + 1);
  } else {
    // A block judged as a whole has no prefix that stands before the whole was read.
    const bool prefix_stands = block.filter.greedy() || params.rule == Rule::kToken;
    block.pad(prefix_stands ? verdict.accepted : 0);
  }
}

}  // namespace polyspec::POLYSPEC_DETAIL
