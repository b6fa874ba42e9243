// The block rule of trees, from the leaves to the root (verify_tree.hpp has it in words). The rows
// between the walk's and the one at work have a frame each, in memory that the group shares; the
// frame at work is in registers.
#pragma once

#include "core/bucket_weight.hpp"
#include "core/verify_tree_request.hpp"

namespace polyspec::POLYSPEC_CORE {

struct PathFrame {
  RowStatistics p, q;
  double scale;  // w
  double left;   // R
  int32_t row;
  int32_t tried;     // the child tried last, -1: none
  int32_t top;       // its bucket
  int32_t children;  // N
};

// Of each part of a group, all with the same values.
struct PathScratch {
  PathFrame frames[kMostDrawnDepth];
  double spent[kMostDrawnDepth][kBuckets];  // L
  BucketScales scales;                      // L / M_q of the frame at work
  uint64_t masses[kBuckets];                // H of the row that was counted last
};

POLYSPEC_FN PathFrame frame_at(int64_t row, double scale) {
  return {
      {0.0f, 0.0f, 1}, {0.0f, 0.0f, 1}, scale, scale, static_cast<int32_t>(row), -1, kBuckets, 0};
}

// f(bucket) for all, in each part of the group. A barrier for the threads that share it; before it
// there has to be one. Collective.
template <class Group, class F>
POLYSPEC_FN void by_each_bucket(Group& group, const F& f) {
  group.by_one_team([&] {
    POLYSPEC_ROLLED
    for (int bucket = group.lane(); bucket < kBuckets; bucket += group.lanes()) f(bucket);
    return int64_t{0};
  });
}

// Keeps a frame in each part of the group. A barrier for the threads that share it. Collective.
template <class Group>
POLYSPEC_FN void keep_frame(Group& group, PathFrame& kept, const PathFrame& frame) {
  group.by_one_team([&] {
    if (group.lane() == 0) kept = frame;
    return int64_t{0};
  });
}

// The child that is tried next, or the tree's count.
struct Choice {
  int64_t child;
  int64_t rest;  // n: children in buckets below the frame's `top`
  double spent;  // L of its bucket
  int32_t bucket;
  bool again;  // another one of its bucket was tried before
};

// `spent`: L by bucket, which may be written once this returns. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN Choice choose_child(Group& group, const Tree<T, kind>& tree, const PathFrame& frame,
                                const BucketWeight<T, kind>& weight, const double* spent) {
  const double p_total = static_cast<double>(frame.p.mass);
  const double q_total = static_cast<double>(frame.q.mass);
  int64_t first = INT64_MAX;  // kBuckets - bucket, and the node; of bucket `top` the node alone
  uint64_t rest = 0;
  POLYSPEC_ROLLED
  for (int64_t i = frame.row + group.rank(); i < tree.count; i += group.size()) {
    if (tree.parent(i) != frame.row - 1) continue;
    const int64_t y = tree.token(i);
    const int64_t bucket =
        frame.children > 1 ? bucket_of(weight.p_mass(y), weight.q_mass(y), p_total, q_total) : 0;
    int64_t key = INT64_MAX;
    if (bucket == frame.top && i > frame.tried) key = i;
    if (bucket < frame.top) {
      key = (kBuckets - bucket) << 32 | i;
      ++rest;
    }
    first = key < first ? key : first;
  }
  first = group.min(first);
  Choice choice{tree.count, 0, 0.0, 0, false};
  if (first == INT64_MAX) return choice;
  const int32_t above = static_cast<int32_t>(first >> 32);
  choice.child = first & 0xffffffff;
  choice.again = above == 0;
  choice.bucket = choice.again ? frame.top : kBuckets - above;
  choice.spent = spent[choice.bucket];
  choice.rest = static_cast<int64_t>(group.sum(rest));
  return choice;
}

// law_b of the choice for bucket b.
POLYSPEC_FN double law_of(const PathFrame& frame, const Choice& choice, const uint64_t* masses,
                          int bucket) {
  const double total = static_cast<double>(frame.q.mass);
  if (frame.children == 1) return bucket == 0 ? 1.0 : 0.0;
  if (choice.again)
    return bucket == choice.bucket ? total / static_cast<double>(masses[bucket]) : 0.0;
  if (bucket >= frame.top) return 0.0;
  uint64_t lower = 0;
  uint64_t all = 0;
  POLYSPEC_ROLLED
  for (int i = 0; i < frame.top; ++i) {
    lower += i < bucket ? masses[i] : 0;
    all += masses[i];
  }
  const double below = static_cast<double>(all);
  const double lo = static_cast<double>(lower) / below;
  const double hi = static_cast<double>(lower + masses[bucket]) / below;
  double sum = 0.0;
  double power = 1.0;  // hi^k
  POLYSPEC_ROLLED
  for (int64_t k = 0; k < choice.rest; ++k) {
    sum = sum * lo + power;
    power *= hi;
  }
  return sum * (total / below);
}

// Children of a row. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN int32_t count_children(Group& group, const Tree<T, kind>& tree, int64_t row) {
  uint64_t children = 0;
  POLYSPEC_ROLLED
  for (int64_t i = row + group.rank(); i < tree.count; i += group.size())
    children += tree.parent(i) == row - 1 ? 1 : 0;
  return static_cast<int32_t>(group.sum(children));
}

// The draw of the test of a node, below so many others.
template <class T, Requests kind>
POLYSPEC_FN double path_draw(const Tree<T, kind>& tree, int64_t depth, int64_t node) {
  return tree.accept_draw(depth, node, node - depth);
}

// polyspec::verify_tree by the block rule for one request. Rank 0 writes the tokens of the current
// path, over tokens of rejected paths. Collective.
template <class T, Requests kind = Requests::kAny, class Group>
POLYSPEC_FN void verify_paths_request(Group& group, const VerifyTreeParams& params, int64_t request,
                                      PathScratch& scratch) {
  TreeWalk<T, kind> walk(params, request);
  const Tree<T, kind>& tree = walk.tree;
  const double unit = mass_unit(head_room(params.vocab));
  bool going = walk.begin(group);
  PathFrame now = frame_at(0, 1.0);
  bool opening = true;   // the frame's row is not read
  int32_t counted = -1;  // row with masses by bucket in scratch
  int level = 0;         // frames below this one
  POLYSPEC_ROLLED
  while (going) {
    const int64_t depth = walk.depth() + level;  // nodes above the row
    if (opening) {
      bool drawn = false;
      const Step step = step_at(group, tree, now.row, depth,
                                [&](int64_t, const RowStatistics& p, const RowStatistics& q) {
                                  drawn = true;
                                  now.p = p;
                                  now.q = q;
                                  return Step{};
                                });
      if (level > 0 && step.status == kStatusEmptyRow &&
          !(path_draw(tree, depth - 1, now.row - 1) < now.scale)) {
        now = scratch.frames[--level];  // the row's node is a leaf, and rejected
        opening = false;
        continue;
      }
      if (!drawn) {
        going = walk.take(group, step);
        if ((step.status & kErrorMask) != 0) walk.outcome.accepted = depth;
        now = frame_at(walk.row, 1.0);
        continue;
      }
      now.children = count_children(group, tree, now.row);
      by_each_bucket(group, [&](int b) { scratch.spent[level][b] = 0.0; });
    }
    double* const spent = scratch.spent[level];
    const BucketWeight<T, kind> weight{
        residual_weight(tree, now.row, -1, now.p, now.q, now.scale, spent[0]),
        now.children > 1 ? &scratch.scales : nullptr};
    const Choice choice = choose_child(group, tree, now, weight, spent);
    if (now.children > 1) {
      by_each_bucket(group, [&](int b) {
        scratch.scales.of[b] = spent[b] / static_cast<double>(now.q.mass);
        if (b > 0) return;
        scratch.scales.p_total = static_cast<double>(now.p.mass);
        scratch.scales.q_total = static_cast<double>(now.q.mass);
      });
    }
    bool over = choice.child == tree.count;
    // A child was rejected. At the root it does not matter how much the last one leaves.
    if (!opening && !(over && level == 0)) {
      // The pass over the rows wants all registers of a GPU, and nothing of the frame.
      keep_frame(group, scratch.frames[level], now);
      const uint64_t left = draw_residual(group, weight, false, 0).total;
      now = scratch.frames[level];
      now.left = static_cast<double>(left) / unit;
      over = over || left == 0;
    }
    if (over) {
      const double h = now.left > 0.0 ? now.left / (now.left + (1.0 - now.scale)) : 0.0;
      if (level > 0 && !(path_draw(tree, depth - 1, now.row - 1) < h)) {
        now = scratch.frames[--level];
        continue;
      }
      Step step;
      step.emission = emit_correction(group, tree, depth, weight, false, now.p,
                                      tree.emit_draw(depth), &step.status);
      walk.stand(now.row, depth);
      going = walk.take(group, step);
      continue;
    }

    const int64_t y = tree.token(choice.child);
    double ratio = 0.0;
    const int32_t status = acceptance_ratio(tree, now.row, y, now.p, now.q, &ratio);
    if (status != 0) {
      walk.fail(status, depth);
      break;
    }
    if (now.children > 1 && counted != now.row) {
      count_buckets(group, weight, scratch.masses);
      counted = now.row;
    }
    const double d = opening ? 1.0 : (1.0 - now.scale) + now.left;
    const double law = law_of(now, choice, scratch.masses, choice.bucket);
    const double chance = (now.scale * ratio - choice.spent) / (d * law);
    by_each_bucket(group, [&](int b) { spent[b] += d * law_of(now, choice, scratch.masses, b); });
    now.top = choice.bucket;
    now.tried = static_cast<int32_t>(choice.child);
    opening = false;
    if (!(chance > 0.0)) continue;
    const double scale = chance < 1.0 ? chance : 1.0;
    if (group.rank() == 0) {
      const float z = tree.target_row(now.row)[y];
      tree.write(depth, now.row, {y, log_probability(z, now.p, tree.filter, weight.p.head), now.p});
      tree.write_path(depth, choice.child);
    }
    const int64_t below = choice.child + 1;
    const int64_t first =
        next_child(group, tree, below, choice.child, [](int64_t) { return true; });
    if (first == tree.count || tree.deterministic(below)) {  // a leaf
      if (!(path_draw(tree, depth, choice.child) < scale)) continue;
      walk.stand(below, depth + 1);
      level = 0;
      now = frame_at(below, 1.0);
    } else if (level + 1 == kMostDrawnDepth) {
      walk.fail(kStatusBadTree, depth + 1);
      break;
    } else {
      keep_frame(group, scratch.frames[level], now);
      ++level;
      now = frame_at(below, scale);
    }
    opening = true;
  }
  walk.end(group);
}

}  // namespace polyspec::POLYSPEC_CORE
