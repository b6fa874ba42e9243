// polyspec::verify for one request, over any thread group.
#pragma once

#include "core/cuts.hpp"
#include "core/rule_block.hpp"

namespace polyspec::POLYSPEC_CORE {

// Finds a request's rows, draft tokens and length; error bits or 0.
template <class T>
POLYSPEC_FN int32_t find_rows(Block<T>* block) {
  const VerifyParams& params = block->params;
  const int64_t request = block->request;
  if (params.offsets != nullptr) {
    const int64_t first = params.offsets[request];
    const int64_t end = params.offsets[request + 1];
    if (first < 0 || first > params.num_rows || end < 0 || end > params.num_rows)
      return kStatusBadIndex;
    block->target_at = first * params.target_stride[1];
    block->tokens_at = block->ids_at = first;
    block->length = end - first - 1;
  } else {
    block->target_at = request * params.target_stride[0];
    block->tokens_at = request * params.draft_tokens_stride;
    block->ids_at = request * params.draft_rows_stride;
    block->length =
        params.draft_lengths != nullptr ? params.draft_lengths[request] : params.draft_len;
  }
  return block->length < 0 || block->length > params.draft_len ? kStatusBadLength : 0;
}

// Reads a request's parameters and finds its rows; error bits or 0.
template <class T>
POLYSPEC_FN int32_t open_block(Block<T>* block) {
  const VerifyParams& params = block->params;
  const int64_t request = block->request;
  block->slot = params.slots != nullptr ? params.slots[request] : request;
  if (params.slots != nullptr && (block->slot < 0 || block->slot >= params.num_slots))
    return kStatusBadIndex;
  block->room = room_for(params.cut, block->slot);
  return find_rows(block) | read_filter(params.sampling, block->slot, &block->filter) |
         read_draws(params.draw, request, block->slot, params.draft_len + 1, &block->draws) |
         (block->room < 0 ? kStatusBadParameter : 0);
}

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_request(Group& group, const VerifyParams& params, int64_t request) {
  Block<T> block(params, request);
  Outcome outcome;
  outcome.status = open_block(&block);
  if (outcome.status == 0 && block.room > 0) {
    if (block.filter.greedy()) {
      outcome = verify_greedy(group, block);
    } else if (params.rule == Rule::kToken) {
      outcome = verify_token(group, block);
    } else {
      outcome = verify_block(group, block);
    }
  }
  if (group.rank() != 0) return;
  int64_t emitted = 0;
  if ((outcome.status & kErrorMask) == 0) {
    if (block.room > 0) {
      block.write(outcome.accepted, outcome.last.token, outcome.last.logprob,
                  outcome.last.statistics);
      emitted = outcome.accepted + 1;
    }
  } else if (block.filter.greedy() || params.rule == Rule::kToken) {
    // A block verified as a whole has no prefix that stands before the whole was read.
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
