// polyspec::verify for one request, over any thread group.
#pragma once

#include "core/cuts.hpp"
#include "core/rule_block.hpp"

namespace polyspec::POLYSPEC_CORE {

// Most tokens that a request may emit; anything but 0 where nothing is cut.
POLYSPEC_FN int64_t room_for(const VerifyParams& params, int64_t request) {
  return wants_cuts(params.cut) ? value_for(params.cut.room, request) : INT64_MAX;
}

// Reads a request's parameters and its length; error bits or 0.
template <class T>
POLYSPEC_FN int32_t open_block(Block<T>* block) {
  const VerifyParams& params = block->params;
  const int64_t request = block->request;
  int32_t status = read_filter(params.sampling, request, &block->filter) |
                   read_draws(params.draw, request, params.draft_len + 1, &block->draws);
  if (params.draft_lengths != nullptr) {
    block->length = params.draft_lengths[request];
    if (block->length < 0 || block->length > params.draft_len) status |= kStatusBadLength;
  }
  if (room_for(params, request) < 0) status |= kStatusBadParameter;
  return status;
}

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_request(Group& group, const VerifyParams& params, int64_t request) {
  Block<T> block{params, request, params.draft_len, {}, {}};
  Outcome outcome;
  outcome.status = open_block(&block);
  const int64_t room = room_for(params, request);
  if (outcome.status == 0 && room > 0) {
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
    if (room > 0) {
      block.write(outcome.accepted, outcome.last.token, outcome.last.logprob,
                  outcome.last.statistics);
      emitted = outcome.accepted + 1;
    }
  } else if (block.filter.greedy() || params.rule == Rule::kToken) {
    // A block verified as a whole has no prefix that stands before the whole was read.
    emitted = outcome.accepted;
  }
  if (wants_cuts(params.cut)) emitted = cut_block(block, emitted, &outcome);
  params.num_accepted[request] = outcome.accepted;
  params.status[request] = outcome.status;
  block.pad(emitted);
}

}  // namespace polyspec::POLYSPEC_CORE
