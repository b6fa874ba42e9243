// polyspec::verify_tree for one request, over any thread group.
#pragma once

#include "core/open_request.hpp"
#include "core/rule_tree.hpp"

namespace polyspec::POLYSPEC_CORE {

// Reads a request's parameters and finds its rows, nodes and their number; error bits or 0.
template <class T, Requests kind>
POLYSPEC_FN int32_t open_tree(Tree<T, kind>* tree) {
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

// The walk down one request's tree: its row, and its outcome so far.
template <class T, Requests kind = Requests::kAny>
struct TreeWalk {
  Tree<T, kind> tree;
  Outcome outcome;
  int64_t row = 0;  // of the target

  POLYSPEC_FN TreeWalk(const VerifyTreeParams& params, int64_t request) : tree(params, request) {}

  // Nodes above the row.
  POLYSPEC_FN int64_t depth() const { return outcome.accepted; }

  // Whether there is a row to begin with. Collective.
  template <class Group>
  POLYSPEC_FN bool begin(Group& group) {
    outcome.status = open_tree(&tree);
    if (outcome.status != 0 || tree.room <= 0) return false;
    outcome.status = check_parents(group, tree);
    return outcome.status == 0;
  }

  // Goes on by the row's step; rank 0 writes its token and node. Whether there is another row.
  template <class Group>
  POLYSPEC_FN bool take(const Group& group, const Step& step) {
    outcome.status = step.status;
    if ((step.status & kErrorMask) != 0) return false;
    if (group.rank() == 0) tree.write(depth(), row, step.emission);
    ++emitted_;
    if (step.child < 0) return false;
    if (group.rank() == 0) tree.write_path(depth(), step.child);
    ++outcome.accepted;
    row = step.child + 1;
    return true;
  }

  // Accepts the nodes down to a row; their tokens are written.
  POLYSPEC_FN void stand(int64_t at, int64_t depth) {
    row = at;
    outcome.accepted = emitted_ = depth;
  }
  // Ends at a row below rejected nodes.
  POLYSPEC_FN void fail(int32_t status, int64_t depth) {
    outcome.status = status;
    outcome.accepted = depth;
  }

  // Rank 0 writes the rest of the outputs.
  template <class Group>
  POLYSPEC_FN void end(const Group& group) {
    if (group.rank() != 0) return;
    const VerifyTreeParams& params = tree.params;
    const int64_t request = tree.request;
    const int64_t stood = emitted_;  // less than `accepted` only after a failure
    int64_t emitted = emitted_;
    if (wants_cuts(params.cut)) {
      const int64_t* tokens = params.tokens + request * (params.depth + 1);
      emitted = cut_emitted(tree, tokens, emitted, &outcome);
    }
    params.num_accepted[request] = outcome.accepted;
    params.status[request] = outcome.status;
    Emission nothing;
    POLYSPEC_ROLLED
    for (int64_t i = emitted; i <= params.depth; ++i) tree.write(i, -1, nothing);
    POLYSPEC_ROLLED
    for (int64_t i = stood < outcome.accepted ? stood : outcome.accepted; i < params.depth; ++i)
      tree.write_path(i, -1);
  }

 private:
  int64_t emitted_ = 0;  // tokens
};

// T is the element type of the target's logits. Collective; rank 0 writes the outputs.
template <class T, class Group>
POLYSPEC_FN void verify_tree_request(Group& group, const VerifyTreeParams& params,
                                     int64_t request) {
  TreeWalk<T> walk(params, request);
  bool going = walk.begin(group);
  while (going) going = walk.take(group, step_at(group, walk.tree, walk.row, walk.depth()));
  walk.end(group);
}

}  // namespace polyspec::POLYSPEC_CORE
