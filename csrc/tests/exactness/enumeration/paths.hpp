// The block rule of trees (verify_tree.hpp) in plain double arithmetic, and three likely mistakes.
#pragma once

#include "exactness/enumeration/tree.hpp"

namespace enumeration {

struct PathsFormula {
  bool laws = true;      // else a child is tested as if it were any draw from q
  bool sums = true;      // else s_{j+1} = s_j + R_j, as where w = 1
  bool in_order = true;  // else equal siblings are joined: the order drawn is lost

  Emitted operator()(const TreeShape&, const ProposedTree& tree) const {
    Emitted emitted;
    walk(tree, 0, {}, 1.0, &emitted);
    return emitted;
  }

 private:
  using Tokens = std::vector<int64_t>;
  static constexpr int kBuckets = 16;

  static std::vector<size_t> children_of(const ProposedTree& tree, size_t row) {
    std::vector<size_t> children;
    for (size_t i = 0; i < tree.tokens.size(); ++i) {
      if (tree.shape.parents[i] == static_cast<int64_t>(row) - 1) children.push_back(i);
    }
    return children;
  }
  static Tokens longer(Tokens before, int64_t token) {
    before.push_back(token);
    return before;
  }
  static void add(const Tokens& before, const Distribution& last, double reached, Emitted* to) {
    for (size_t x = 0; x < last.size(); ++x) {
      if (last[x] > 0.0) (*to)[longer(before, static_cast<int64_t>(x))] += reached * last[x];
    }
  }

  // From a root on.
  void walk(const ProposedTree& tree, size_t row, const Tokens& before, double reached,
            Emitted* emitted) const {
    std::vector<size_t> children = children_of(tree, row);
    if (tree.shape.drawn[row] && !children.empty()) {
      verify(tree, row, before, 1.0, true, reached, emitted);
      return;
    }
    Distribution own = tree.p[row];
    for (const size_t child : children) {
      const size_t x = static_cast<size_t>(tree.tokens[child]);
      if (own[x] > 0.0)
        walk(tree, child + 1, longer(before, tree.tokens[child]), reached * own[x], emitted);
      own[x] = 0.0;
    }
    add(before, own, reached, emitted);
  }

  // Returns the part of `reached` that is rejected at the row and below.
  double verify(const ProposedTree& tree, size_t row, const Tokens& before, double w, bool root,
                double reached, Emitted* emitted) const {
    std::vector<size_t> rest = children_of(tree, row);
    if (!tree.shape.drawn[row] || rest.empty()) {
      if (w > 0.0) walk(tree, row, before, reached * w, emitted);
      return reached * (1.0 - w);
    }
    const Distribution& p = tree.p[row];
    const Distribution& q = tree.q[row];
    const auto token = [&](size_t child) { return static_cast<size_t>(tree.tokens[child]); };
    std::vector<int> bucket(p.size(), 0);
    std::vector<double> held(kBuckets, 0.0), spent(kBuckets, 0.0);
    for (size_t x = 0; x < p.size(); ++x) {
      if (rest.size() > 1 && q[x] > 0.0) {
        const double power = p[x] > 0.0 ? std::floor(std::log2(p[x] / q[x])) : -8.0;
        bucket[x] = 8 + static_cast<int>(std::min(std::max(power, -8.0), 7.0));
      }
      held[static_cast<size_t>(bucket[x])] += q[x];
    }
    if (!in_order) {
      std::stable_sort(rest.begin(), rest.end(), [&](size_t a, size_t b) {
        const auto first = [&](size_t child) {
          return *std::find_if(rest.begin(), rest.end(),
                               [&](size_t other) { return token(other) == token(child); });
        };
        return first(a) < first(b);
      });
    }
    std::vector<size_t> again;
    int top = kBuckets;
    double left = w;
    Distribution residual(p.size());
    for (bool first = true; left > 1e-15 && !(rest.empty() && again.empty()); first = false) {
      std::vector<double> law(kBuckets, 0.0);
      size_t child;
      if (!again.empty()) {
        child = again.front();
        again.erase(again.begin());
        const size_t own = static_cast<size_t>(bucket[token(child)]);
        law[own] = 1.0 / held[own];
      } else {
        double below = 0.0, lower = 0.0;
        for (int b = 0; b < top; ++b) below += held[static_cast<size_t>(b)];
        const double count = static_cast<double>(rest.size());
        for (int b = 0; b < top; ++b) {  // (hi^n - lo^n) / (hi - lo)
          const size_t at = static_cast<size_t>(b);
          if (held[at] == 0.0) continue;
          const double hi = (lower + held[at]) / below;
          law[at] = (std::pow(hi, count) - std::pow(lower / below, count)) / held[at];
          lower += held[at];
        }
        int best = -1;
        for (const size_t one : rest) best = std::max(best, bucket[token(one)]);
        std::vector<size_t> others;
        for (const size_t one : rest) (bucket[token(one)] == best ? again : others).push_back(one);
        rest = others;
        child = again.front();
        again.erase(again.begin());
        top = best;
      }
      if (!laws) std::fill(law.begin(), law.end(), 1.0);
      const size_t x = token(child), own = static_cast<size_t>(bucket[x]);
      const double d = 1.0 - w + left;
      const double above = std::max(w * p[x] - spent[own] * q[x], 0.0);
      const double a = std::min(1.0, above / (d * law[own] * q[x]));
      if (a > 0.0) {
        reached =
            verify(tree, child + 1, longer(before, tree.tokens[child]), a, false, reached, emitted);
      }
      for (size_t b = 0; b < spent.size(); ++b) spent[b] += (sums || first ? d : left) * law[b];
      left = 0.0;
      for (size_t y = 0; y < p.size(); ++y) {
        residual[y] = std::max(w * p[y] - spent[static_cast<size_t>(bucket[y])] * q[y], 0.0);
        left += residual[y];
      }
    }
    const double h = root ? 1.0 : left > 1e-15 ? left / (left + 1.0 - w) : 0.0;
    if (h > 0.0 && left > 0.0) add(before, normalised(residual), reached * h, emitted);
    return reached * (1.0 - h);
  }
};

}  // namespace enumeration
