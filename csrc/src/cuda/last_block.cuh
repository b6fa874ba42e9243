// One row of a tree per group, and the group that comes last walks down the tree by the rows'
// steps.
//
// The groups of a request count themselves with an atomic ticket. The group that draws the last
// ticket knows that all rows are recorded; the same addition puts the ticket back to zero for the
// next call. No group waits for another, so the groups need not run at the same time, and nothing
// has to be cleared between calls.
#pragma once

#include "core/verify_tree_request.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

// Whether this is the last of a request's groups, one and `others`; rank 0 has recorded its row.
// *ticket: 0 before the first group of a call comes, and again after the last. Collective.
template <class Group>
__device__ __forceinline__ bool comes_last(Group& group, unsigned* ticket, unsigned others) {
  uint64_t last = 0;
  if (group.rank() == 0) {
    __threadfence();  // a group that sees the ticket taken sees the record
    last = atomicInc(ticket, others) == others ? 1 : 0;  // which follows `others` with 0
    __threadfence();  // and other groups' records are seen after their tickets
  }
  return group.sum(last) != 0;
}

// Nodes above a row of a tree with valid parents; -1 where the row is not in the tree, or deeper
// than a path may be.
template <class T, Requests kind>
__device__ __forceinline__ int64_t depth_of(const Tree<T, kind>& tree, int64_t row) {
  if (row > tree.count) return -1;
  int64_t depth = 0;
  for (int64_t node = row - 1; node >= 0; node = tree.parent(node)) {
    if (++depth > tree.params.depth) return -1;
  }
  return depth;
}

// The walk down a request's tree. Without steps: by one group, which takes them one after the
// other. With steps, [n+1]: that of row i, and the walk when the other rows are done. Collective.
template <class T, Requests kind, class Group>
__device__ __forceinline__ void walk_tree(Group& group, const VerifyTreeParams& params,
                                          int64_t request, int64_t i, Step* steps,
                                          unsigned* ticket) {
  TreeWalk<T, kind> walk(params, request);
  bool going = walk.begin(group);
  if (!going && i > 0) return;  // all groups of the request see the same
  int64_t depth = going && steps != nullptr ? depth_of(walk.tree, i) : 0;
  bool known = false;
  POLYSPEC_ROLLED
  while (going) {  // one loop for both, since inlined twice a step would be the most of a kernel
    Step step;
    if (known) {
      step = steps[walk.row];
    } else if (depth >= 0) {
      step = step_at(group, walk.tree, i, depth);
    }
    if (steps != nullptr && !known) {
      if (group.rank() == 0) steps[i] = step;
      if (!comes_last(group, ticket, static_cast<unsigned>(params.nodes))) return;
      known = true;
      continue;
    }
    going = walk.take(group, step);
    i = walk.row;
    depth = walk.depth();
  }
  walk.end(group);
}

}  // namespace polyspec::POLYSPEC_CORE
