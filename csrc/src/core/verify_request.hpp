// polyspec::verify for one request, over any thread group.
#pragma once

#include "core/block_rules.hpp"
#include "core/open_request.hpp"

namespace polyspec::POLYSPEC_CORE {

// Reads a request's parameters and finds its rows, draft tokens and length; error bits or 0.
template <class T, Requests kind>
POLYSPEC_FN int32_t open_block(Block<T, kind>* block) {
  const VerifyParams& params = block->params;
  const int64_t request = block->request;
  Extent extent;
  const int32_t error =
      open_request(block, params.draft_lengths, params.draft_len, params.draft_len + 1, &extent);
  if (params.offsets != nullptr) {
    block->target_at = extent.first * params.target_stride[1];
    block->tokens_at = block->ids_at = extent.first;
  } else {
    block->target_at = request * params.target_stride[0];
    block->tokens_at = request * params.draft_tokens_stride;
    block->ids_at = request * params.draft_rows_stride;
  }
  block->length = extent.length;
  block->rows = extent.rows;
  return error;
}

// T is the element type of the target's logits, Rules says which rule. Collective; rank 0 writes
// the outputs.
template <class T, Requests kind = Requests::kAny, class Rules = RuleOfCall, class Group>
POLYSPEC_FN void verify_request(Group& group, const VerifyParams& params, int64_t request) {
  Block<T, kind> block(params, request);
  Outcome outcome;
  outcome.status = open_block(&block);
  if (outcome.status == 0 && block.room > 0) {
    outcome =
        block.filter.greedy() ? verify_greedy(group, block) : verify_sampled<Rules>(group, block);
  }
  if (group.rank() != 0) return;
  int64_t emitted = 0;
  if ((outcome.status & kErrorMask) == 0) {
    emitted = outcome.accepted;
    if (block.room > 0 && emitted < block.rows) {
      block.write(outcome.accepted, outcome.last.token, outcome.last.logprob,
                  outcome.last.statistics);
      ++emitted;
    }
  } else if (block.filter.greedy() || !Rules::whole(params)) {
    // A block verified as a whole has no accepted prefix before the whole was read.
    emitted = outcome.accepted;
  }
  if (wants_cuts(params.cut)) {
    const int64_t* tokens = params.tokens + request * (params.draft_len + 1);
    emitted = cut_emitted(block, tokens, emitted, &outcome);
  }
  params.num_accepted[request] = outcome.accepted;
  params.status[request] = outcome.status;
  block.pad(emitted);
}

}  // namespace polyspec::POLYSPEC_CORE
