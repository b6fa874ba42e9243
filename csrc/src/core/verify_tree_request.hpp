// polyspec::verify_tree for one request, over any thread group.
#pragma once

#include "core/cuts.hpp"
#include "core/rule_tree.hpp"

namespace polyspec::POLYSPEC_CORE {

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_tree_request(Group& group, const VerifyTreeParams& params,
                                     int64_t request) {
  Tree<T> tree(params, request);
  tree.room = room_for(params.cut, request);
  Outcome outcome;
  outcome.status =
      read_filter(params.sampling, request, &tree.filter) |
      read_draws(params.draw, request, request, params.nodes + params.depth + 1, &tree.draws) |
      (tree.count < 0 || tree.count > params.nodes ? kStatusBadLength : 0) |
      (tree.room < 0 ? kStatusBadParameter : 0);
  const bool walks = outcome.status == 0 && tree.room > 0;
  if (walks) outcome = walk_tree(group, tree);
  if (group.rank() != 0) return;
  int64_t emitted = outcome.accepted;
  if (walks && (outcome.status & kErrorMask) == 0) ++emitted;
  if (wants_cuts(params.cut)) {
    const int64_t* tokens = params.tokens + request * (params.depth + 1);
    emitted = cut_emitted(tree, tokens, emitted, &outcome);
  }
  params.num_accepted[request] = outcome.accepted;
  params.status[request] = outcome.status;
  Emission nothing;
  for (int64_t i = emitted; i <= params.depth; ++i) tree.write(i, -1, nothing);
  for (int64_t i = outcome.accepted; i < params.depth; ++i) tree.write_path(i, -1);
}

}  // namespace polyspec::POLYSPEC_CORE
