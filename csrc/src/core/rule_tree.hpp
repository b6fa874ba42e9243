// The walk down one request's tree: deterministic children by one draw from the row, children drawn
// from a draft distribution by the recursive residual (verify_tree.hpp has both in words).
#pragma once

#include "core/verify_parts.hpp"
#include "polyspec/verify_tree.hpp"

namespace polyspec::POLYSPEC_CORE {

// One request's tree. Row i of the target is the row after node i-1, row 0 the row after the root;
// draft rows, by their ids, likewise.
template <class T, Requests kind = Requests::kAny>
struct Tree {
  const VerifyTreeParams& params;
  int64_t request;
  int64_t slot = 0;   // of its parameters
  int64_t count = 0;  // nodes
  int64_t room = INT64_MAX;
  int64_t target_at = 0;  // its first index in: target logits, nodes, draft rows' ids
  int64_t nodes_at = 0;
  int64_t ids_at = 0;
  Filter<kind> filter{};
  Draws draws{};

  POLYSPEC_FN Tree(const VerifyTreeParams& params, int64_t request)
      : params(params), request(request) {}

  POLYSPEC_FN Row<T> target_row(int64_t i) const {
    return row_at<T>(params.target_logits, params.target_dtype,
                     target_at + i * params.target_stride[1], params.vocab,
                     allowed_row<T>(params, request, i));
  }
  POLYSPEC_FN int64_t row_id(int64_t i) const {
    return params.draft_rows != nullptr ? params.draft_rows[ids_at + i] : -1;
  }
  POLYSPEC_FN bool deterministic(int64_t i) const { return row_id(i) == -1; }
  POLYSPEC_FN bool draft_row_exists(int64_t i) const {
    return row_id(i) >= 0 && row_id(i) < params.num_draft_rows;
  }
  POLYSPEC_FN DraftRow<T, kind> draft_row(int64_t i) const {
    return draft_row_at<DraftRow<T, kind>>(params.draft_logits, params.draft_dtype,
                                           row_id(i) * params.draft_stride, params.draft_vocab);
  }
  POLYSPEC_FN const RowStatistics& statistics_at(int64_t i) const {
    return params.draft_statistics[row_id(i)];
  }
  POLYSPEC_FN int64_t token(int64_t node) const { return params.draft_tokens[nodes_at + node]; }
  // As of Block: each node is the input of a row.
  POLYSPEC_FN static constexpr bool unread(int64_t) { return false; }
  POLYSPEC_FN int64_t parent(int64_t node) const { return params.parents[nodes_at + node]; }
  POLYSPEC_FN bool valid(int64_t node) const {
    return token(node) >= 0 && token(node) < params.vocab;
  }
  // The test of a node, the `sibling`th of its parent's children, and the token drawn at a depth.
  POLYSPEC_FN double accept_draw(int64_t depth, int64_t node, int64_t sibling) const {
    return open_unit(draws.at(depth, node, Purpose::kAccept, sibling));
  }
  POLYSPEC_FN uint64_t emit_draw(int64_t depth) const {
    return draws.at(depth, params.nodes + depth, Purpose::kEmit);
  }

  // Writes the token of a depth, drawn from a row; rank 0 only.
  POLYSPEC_FN void write(int64_t depth, int64_t row, const Emission& emission) const {
    const int64_t at = request * (params.depth + 1) + depth;
    params.tokens[at] = emission.token;
    params.rows[at] = row;
    params.logprobs[at] = emission.logprob;
    if (params.statistics != nullptr) params.statistics[at] = emission.statistics;
  }
  POLYSPEC_FN void write_path(int64_t depth, int64_t node) const {
    params.path[request * params.depth + depth] = node;
  }
};

// First child of the row's node after node `after` that `wanted` accepts, or the tree's count.
// Collective.
template <class T, Requests kind, class Group, class Wanted>
POLYSPEC_FN int64_t next_child(Group& group, const Tree<T, kind>& tree, int64_t row, int64_t after,
                               const Wanted& wanted) {
  int64_t found = tree.count;
  POLYSPEC_ROLLED
  for (int64_t i = after + 1 + group.rank(); i < tree.count; i += group.size()) {
    if (tree.parent(i) != row - 1 || !wanted(i)) continue;
    found = i;
    break;
  }
  return group.min(found);
}

// Whether every node's parent comes before it. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN int32_t check_parents(Group& group, const Tree<T, kind>& tree) {
  uint64_t bad = 0;
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < tree.count; i += group.size())
    bad += tree.parent(i) < -1 || tree.parent(i) >= i ? 1 : 0;
  return group.sum(bad) == 0 ? 0 : kStatusBadTree;
}

// The error bits of a row's children, or 0. Equal children are a fault where they are
// deterministic. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN int32_t check_children(Group& group, const Tree<T, kind>& tree, int64_t row,
                                   int64_t depth) {
  const bool distinct = tree.deterministic(row);
  uint64_t outside = 0;
  uint64_t faults = 0;
  POLYSPEC_ROLLED
  for (int64_t i = row + group.rank(); i < tree.count; i += group.size()) {
    if (tree.parent(i) != row - 1) continue;
    outside += tree.valid(i) ? 0 : 1;
    faults += depth == tree.params.depth ? 1 : 0;  // a path longer than there is room for
    POLYSPEC_ROLLED
    for (int64_t j = row; distinct && j < i; ++j)
      faults += tree.parent(j) == row - 1 && tree.token(j) == tree.token(i) ? 1 : 0;
  }
  const uint64_t all = group.sum(outside << 32 | faults);
  if (all >> 32 != 0) return kStatusTokenOutOfRange;
  return all == 0 ? 0 : kStatusBadTree;
}

// The result of a row of the walk: the child that it goes on with, or -1, and the token.
struct Step {
  int64_t child = -1;
  int32_t status = 0;
  Emission emission{};
};

// The children one after the other, `child` the first of them, each against the residual that the
// children before it leave of the row's distribution. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN Step step_by_residual(Group& group, const Tree<T, kind>& tree, int64_t row,
                                  int64_t depth, int64_t child, const RowStatistics& p_statistics,
                                  const RowStatistics& q_statistics) {
  const VerifyTreeParams& params = tree.params;
  const double unit = mass_unit(head_room(params.vocab));
  Step step;
  bool summed = true;
  ResidualWeight<T, kind> weight =
      residual_weight(tree, row, -1, p_statistics, q_statistics, 1.0, 1.0);
  double scale = 1.0;  // s_j, once the first child is rejected
  uint64_t total = 0;  // of the residual's masses
  for (int64_t sibling = 0; child < tree.count; ++sibling) {
    const int64_t y = tree.token(child);
    double ratio = 0.0;
    if (sibling == 0) {
      step.status = acceptance_ratio(tree, row, y, p_statistics, q_statistics, &ratio);
    } else {
      uint64_t own = 1;
      step.status = draft_mass(tree, row, y, q_statistics, &own);
      ratio = (static_cast<double>(weight(y)) * static_cast<double>(q_statistics.mass)) /
              (static_cast<double>(own) * static_cast<double>(total));
    }
    if (step.status != 0) return step;
    if (tree.accept_draw(depth, child, sibling) < ratio) {
      step.child = child;
      step.emission.token = y;
      step.emission.logprob =
          log_probability(tree.target_row(row)[y], p_statistics, tree.filter, weight.p.head);
      step.emission.statistics = p_statistics;
      return step;
    }
    if (sibling > 0) scale += static_cast<double>(total) / unit;
    weight.q_scale = scale / static_cast<double>(q_statistics.mass);
    child = next_child(group, tree, row, child, [](int64_t) { return true; });
    if (child == tree.count) break;
    total = draw_residual(group, weight, false, 0).total;
    summed = false;
    if (total == 0) {  // nothing is left but rounding
      step.status |= kStatusZeroResidual;
      sum_tiles(group, params.vocab, weight.p);
      step.emission = emit_from_row(group, tree, row, p_statistics, tree.emit_draw(depth));
      return step;
    }
  }
  step.emission = emit_correction(group, tree, depth, weight, summed, p_statistics,
                                  tree.emit_draw(depth), &step.status);
  return step;
}

// The row's token, drawn or its argmax, and the child that it is; or, where `first` is not -1, the
// result of by_draws(first, p's statistics, q's) for drawn children. Collective.
template <class T, Requests kind, class Group, class ByDraws>
POLYSPEC_FN Step step_from(Group& group, const Tree<T, kind>& tree, int64_t row, int64_t depth,
                           int64_t first, const ByDraws& by_draws) {
  Step step;
  if (tree.filter.greedy()) {
    step.status = target_argmax(group, tree, row, &step.emission);
  } else {
    RowStatistics p_statistics;
    RowStatistics q_statistics{0.0f, 0.0f, 1};
    int32_t q_error;
    both_statistics(group, tree, row, first >= 0, &p_statistics, &q_statistics, &step.status,
                    &q_error);
    if (step.status == 0) step.status = q_error;
    if (step.status == 0 && first >= 0) return by_draws(first, p_statistics, q_statistics);
    if (step.status == 0)
      step.emission = emit_from_row(group, tree, row, p_statistics, tree.emit_draw(depth));
  }
  if (step.status != 0) return step;
  const int64_t token = step.emission.token;
  const int64_t child =
      next_child(group, tree, row, row - 1, [&](int64_t i) { return tree.token(i) == token; });
  if (child < tree.count) step.child = child;
  return step;
}

// The step of a walk that is at a row: the children are checked first. It depends on the row and
// its depth, on no other step. `by_draws`: of drawn children, see step_from. Collective.
template <class T, Requests kind, class Group, class ByDraws>
POLYSPEC_FN Step step_at(Group& group, const Tree<T, kind>& tree, int64_t row, int64_t depth,
                         const ByDraws& by_draws) {
  Step step;
  step.status = check_children(group, tree, row, depth);
  if (step.status != 0) return step;
  const int64_t first = next_child(group, tree, row, row - 1, [](int64_t) { return true; });
  const bool one = tree.filter.greedy() || first == tree.count || tree.deterministic(row);
  return step_from(group, tree, row, depth, one ? -1 : first, by_draws);
}

// The same by the token rule. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN Step step_at(Group& group, const Tree<T, kind>& tree, int64_t row, int64_t depth) {
  return step_at(group, tree, row, depth,
                 [&](int64_t first, const RowStatistics& p, const RowStatistics& q) {
                   return step_by_residual(group, tree, row, depth, first, p, q);
                 });
}

}  // namespace polyspec::POLYSPEC_CORE
