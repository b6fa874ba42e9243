// polyspec::verify_tree for one request, over any thread group.
#pragma once

#include "core/open_request.hpp"
#include "core/rule_tree.hpp"

namespace polyspec::POLYSPEC_CORE {

// Reads a request's parameters and finds its rows, nodes and their number; error bits or 0.
template <class T>
POLYSPEC_FN int32_t open_tree(Tree<T>* tree) {
  const VerifyTreeParams& params = tree->params;
  const int64_t request = tree->request;
  Extent extent;
  const int32_t error =
      open_request(tree, params.counts, params.nodes, params.nodes + params.depth + 1, &extent);
  if (params.offsets != nullptr) {
    tree->target_at = extent.first * params.target_stride[1];
    tree->nodes_at = tree->ids_at = extent.first;
  } else {
    tree->target_at = request * params.target_stride[0];
    tree->nodes_at = request * params.nodes;
    tree->ids_at = request * (params.nodes + 1);
  }
  tree->count = extent.length;
  return error;
}

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_tree_request(Group& group, const VerifyTreeParams& params,
                                     int64_t request) {
  Tree<T> tree(params, request);
  Outcome outcome;
  outcome.status = open_tree(&tree);
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
