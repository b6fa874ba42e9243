// Enumerates the texts that trees of draft tokens give: every tree that a toy drafter can propose,
// every path that polyspec::verify_tree can emit for it, round after round.
#pragma once

#include <functional>

#include "chain.hpp"
#include "polyspec/verify_tree.hpp"

namespace enumeration {

// A tree's shape and the kind of the children of each row.
struct TreeShape {
  std::vector<int64_t> parents;
  std::vector<bool> drawn;  // [n+1]: drawn from the drafter's distribution; else its likeliest
};

struct ToyTree {
  ToyModel target, drafter;
  polyspec::SamplingParams sampling;
  TreeShape shape;
  int eos = -1;
  polyspec::Rule rule = polyspec::Rule::kToken;
  // So many paths instead of a shape, of nodes / paths tokens: paths share the nodes of a common
  // prefix; a token drawn again is a node without children.
  int64_t paths = 0;
};

// One proposed tree after a text and its distributions, by row.
struct ProposedTree {
  TreeShape shape;
  std::vector<int64_t> tokens;
  std::vector<Distribution> p, q;  // [n+1]
  double probability = 1.0;
};

// Probabilities of a verification's outputs.
using Emitted = std::map<std::vector<int64_t>, double>;
using TreeRule = std::function<Emitted(const TreeShape&, const ProposedTree&)>;

// The formulas for a tree. `next_residual(r, p, q)` is the residual of r after a rejection and
// `ratio(r, p, q, x)` the probability with which child x is accepted.
struct TreeFormula {
  std::function<double(const Distribution&, const Distribution&, const Distribution&, int64_t)>
      ratio;
  std::function<Distribution(const Distribution&, const Distribution&, const Distribution&)>
      next_residual;

  Emitted operator()(const TreeShape& shape, const ProposedTree& tree) const {
    Emitted emitted;
    walk(shape, tree, 0, {}, 1.0, &emitted);
    return emitted;
  }

 private:
  void walk(const TreeShape& shape, const ProposedTree& tree, size_t row,
            const std::vector<int64_t>& before, double reached, Emitted* emitted) const {
    Distribution r = tree.p[row];
    for (size_t node = 0; node < shape.parents.size() && reached > 0.0; ++node) {
      if (shape.parents[node] != static_cast<int64_t>(row) - 1) continue;
      const int64_t x = tree.tokens[node];
      Distribution one_hot(r.size(), 0.0);
      one_hot[static_cast<size_t>(x)] = 1.0;
      const Distribution& q = shape.drawn[row] ? tree.q[row] : one_hot;
      const double a = std::min(1.0, ratio(r, tree.p[row], q, x));
      std::vector<int64_t> longer = before;
      longer.push_back(x);
      if (a > 0.0) walk(shape, tree, node + 1, longer, reached * a, emitted);
      reached *= 1.0 - a;
      r = next_residual(r, tree.p[row], q);
    }
    const Distribution last = normalised(r);
    for (size_t x = 0; x < last.size() && reached > 0.0; ++x) {
      if (last[x] == 0.0) continue;
      std::vector<int64_t> longer = before;
      longer.push_back(static_cast<int64_t>(x));
      (*emitted)[longer] += reached * last[x];
    }
  }
};

inline Distribution left_over(const Distribution& r, const Distribution& q) {
  Distribution left(r.size());
  for (size_t x = 0; x < r.size(); ++x) left[x] = std::max(r[x] - q[x], 0.0);
  return left;
}

// Accept x with r(x)/q(x), else r becomes norm(max(r - q, 0)): for a deterministic child, accept
// with r(x), else zero it and renormalise.
inline TreeFormula recursive_residual() {
  return {[](const auto& r, const auto&, const auto& q, int64_t x) {
            return r[static_cast<size_t>(x)] / q[static_cast<size_t>(x)];
          },
          [](const auto& r, const auto&, const auto& q) { return normalised(left_over(r, q)); }};
}
// TensorRT-LLM's rule for dynamic trees: the same p/q for every sibling, and a residual that knows
// of no earlier one.
inline TreeFormula same_ratio_for_siblings() {
  return {[](const auto&, const auto& p, const auto& q, int64_t x) {
            return p[static_cast<size_t>(x)] / q[static_cast<size_t>(x)];
          },
          [](const auto&, const auto& p, const auto& q) { return left_over(p, q); }};
}
// The recursive residual without bringing it to 1 between siblings.
inline TreeFormula without_renormalisation() {
  return {[](const auto& r, const auto&, const auto& q, int64_t x) {
            return r[static_cast<size_t>(x)] / q[static_cast<size_t>(x)];
          },
          [](const auto& r, const auto&, const auto& q) { return left_over(r, q); }};
}

// Runs polyspec::verify_tree with chosen bits, as the second request of a batch with another tree
// in the first: fewer nodes, all deterministic.
class TreeVerification {
 public:
  TreeVerification(const ToyTree& tree, const Text& text, const ProposedTree& proposed)
      : n_(static_cast<int64_t>(proposed.tokens.size())), vocab_(tree.target.vocab()) {
    const TreeShape& shape = proposed.shape;
    const std::vector<int64_t>& tokens = proposed.tokens;
    parents_.assign(static_cast<size_t>(n_), -1);
    tokens_ = std::vector<int64_t>(static_cast<size_t>(n_), 0);
    rows_ids_.assign(static_cast<size_t>(n_ + 1), -1);
    std::vector<Text> texts{text};
    for (int64_t i = 0; i < n_; ++i) {
      const size_t at = static_cast<size_t>(i);
      texts.push_back(texts[static_cast<size_t>(shape.parents[at] + 1)] +
                      static_cast<char>(tokens[at]));
    }
    const float* first = tree.target.after(text);
    for (int64_t i = 0; i <= n_; ++i) target_.insert(target_.end(), first, first + vocab_);
    for (int64_t i = 0; i <= n_; ++i) {
      const Text& before = texts[static_cast<size_t>(i)];
      const float* p = tree.target.after(before);
      const float* q = tree.drafter.after(before);
      target_.insert(target_.end(), p, p + vocab_);
      pool_.insert(pool_.begin(), q, q + vocab_);  // the pool in another order
      rows_ids_.push_back(shape.drawn[static_cast<size_t>(i)] ? n_ - i : -1);
    }
    parents_.insert(parents_.end(), shape.parents.begin(), shape.parents.end());
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    counts_ = {n_ > 0 ? 1 : 0, n_};
    const size_t emitted = static_cast<size_t>(2 * (n_ + 1));
    bits_.assign(static_cast<size_t>(2 * (2 * n_ + 1)), 0);
    out_.resize(emitted);
    rows_.resize(emitted);
    path_.resize(static_cast<size_t>(2 * n_));
    logprobs_.resize(emitted);
    params_.batch = 2;
    params_.nodes = params_.depth = n_;
    params_.vocab = params_.draft_vocab = vocab_;
    params_.target_logits = target_.data();
    params_.target_stride[0] = (n_ + 1) * vocab_;
    params_.target_stride[1] = vocab_;
    params_.draft_tokens = tokens_.data();
    params_.parents = parents_.data();
    params_.counts = counts_.data();
    params_.draft_logits = pool_.data();
    params_.draft_stride = vocab_;
    params_.num_draft_rows = n_ + 1;
    params_.draft_rows = rows_ids_.data();
    params_.sampling = tree.sampling;
    params_.rule = tree.rule;
    params_.draw.bits = bits_.data();
    params_.tokens = out_.data();
    params_.num_accepted = accepted_;
    params_.path = path_.data();
    params_.rows = rows_.data();
    params_.logprobs = logprobs_.data();
    params_.status = status_;
  }

  // Of the request under test: n tests, then the tokens of depth 0 ... n.
  uint64_t& bits(int64_t i) { return bits_[static_cast<size_t>(2 * n_ + 1 + i)]; }
  int64_t run() {
    CHECK(polyspec::verify_tree(params_).ok());
    CHECK_EQ(0, status_[0]);
    CHECK_EQ(0, status_[1] & (polyspec::kStatusNotes - 1));
    return accepted_[1];
  }
  int32_t status() const { return status_[1]; }
  int64_t token(int64_t depth) const { return out_[static_cast<size_t>(n_ + 1 + depth)]; }
  int64_t row(int64_t depth) const { return rows_[static_cast<size_t>(n_ + 1 + depth)]; }
  int64_t node(int64_t depth) const { return path_[static_cast<size_t>(n_ + depth)]; }
  std::vector<int64_t> emitted() const {
    for (int64_t i = 0; i <= n_; ++i) CHECK_EQ(i > accepted_[1], token(i) == -1);
    for (int64_t i = 0; i < accepted_[1]; ++i) CHECK_EQ(node(i) + 1, row(i + 1));
    return {out_.begin() + n_ + 1, out_.begin() + n_ + 2 + accepted_[1]};
  }

 private:
  int64_t n_, vocab_;
  std::vector<float> target_, pool_;
  std::vector<int64_t> parents_, tokens_, rows_ids_, counts_, out_, rows_, path_;
  std::vector<uint64_t> bits_;
  std::vector<float> logprobs_;
  int64_t accepted_[2] = {0, 0};
  int32_t status_[2] = {0, 0};
  polyspec::VerifyTreeParams params_;
};

class TreeEnumerator {
 public:
  explicit TreeEnumerator(ToyTree tree, TreeRule formula = recursive_residual())
      : tree_(std::move(tree)), formula_(std::move(formula)) {}

  // The distribution of the text with production verifications, or by a rule of formulas.
  TextDistribution texts(size_t length, const TreeRule& rule = nullptr) {
    TextDistribution open{{Text(), 1.0}}, ended;
    while (!open.empty()) {
      TextDistribution longer;
      for (const auto& [text, probability] : open) {
        for (const auto& [tokens, p] : round(text, rule)) {
          Text next = text;
          bool end = false;
          for (const int64_t token : tokens) {
            next.push_back(static_cast<char>(token));
            end = token == tree_.eos || next.size() == length;
            if (end) break;
          }
          (end ? ended : longer)[next] += probability * p;
        }
      }
      open = std::move(longer);
    }
    return ended;
  }

  TextDistribution target_texts(size_t length) {
    TextDistribution open{{Text(), 1.0}}, ended;
    while (!open.empty()) {
      TextDistribution longer;
      for (const auto& [text, probability] : open) {
        const Distribution& p = sampled(true, text);
        for (size_t x = 0; x < p.size(); ++x) {
          const Text next = text + static_cast<char>(x);
          const bool end = static_cast<int>(x) == tree_.eos || next.size() == length;
          if (p[x] > 0.0) (end ? ended : longer)[next] += probability * p[x];
        }
      }
      open = std::move(longer);
    }
    return ended;
  }

  double worst_deviation() const { return worst_; }  // of verify_tree from the formulas
  size_t verifications() const { return verifications_; }
  double tokens_per_round(const Text& text) {
    double sum = 0.0;
    for (const auto& [tokens, p] : round(text, nullptr))
      sum += p * static_cast<double>(tokens.size());
    return sum;
  }

 private:
  static Text context(const Text& text) {
    return text.size() <= 2 ? text : text.substr(text.size() - 2);
  }

  const Distribution& sampled(bool target, const Text& text) {
    const auto [at, fresh] = sampled_[target].try_emplace(context(text));
    if (fresh) {
      const ToyModel& model = target ? tree_.target : tree_.drafter;
      polyspec::SampleParams params;
      params.vocab = model.vocab();
      params.logits = model.after(text);
      params.sampling = tree_.sampling;
      polyspec::RowStatistics unused;
      at->second = find_sample_distribution(params, &unused);
    }
    return at->second;
  }

  Emitted round(const Text& text, const TreeRule& rule) {
    const Text key = context(text);
    if (!rule && rounds_.count(key) != 0) return rounds_[key];
    Emitted all;
    ProposedTree tree;
    tree.shape = {{}, tree_.shape.drawn};
    std::vector<Text> texts{key};
    tree.p.push_back(sampled(true, key));
    tree.q.push_back(sampled(false, key));
    grow(&tree, &texts, [&](const ProposedTree& proposed) {
      const Emitted one = rule ? rule(proposed.shape, proposed) : verified(key, proposed);
      for (const auto& [tokens, p] : one) all[tokens] += proposed.probability * p;
    });
    if (!rule) rounds_[key] = all;
    return all;
  }

  // All trees, node by node.
  template <class Use>
  void grow(ProposedTree* tree, std::vector<Text>* texts, const Use& use) {
    const size_t node = tree->tokens.size();
    const TreeShape& shape = tree_.shape;
    if (node == shape.parents.size()) return use(*tree);
    std::vector<int64_t>& parents = tree->shape.parents;
    parents.push_back(tree_.paths > 0 ? parent_on_path(*tree, node) : shape.parents[node]);
    const size_t row = static_cast<size_t>(parents[node] + 1);
    const Distribution q = tree->q[row];
    size_t sibling = 0;
    for (size_t i = 0; i < node; ++i) sibling += parents[i] == parents[node] ? 1 : 0;
    std::vector<size_t> order(q.size());
    for (size_t x = 0; x < order.size(); ++x) order[x] = x;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return q[a] > q[b]; });
    const double before = tree->probability;
    for (size_t x = 0; x < q.size(); ++x) {
      if (shape.drawn[row] ? q[x] == 0.0 : x != order[sibling]) continue;
      tree->probability = before * (shape.drawn[row] ? q[x] : 1.0);
      const Text text = (*texts)[row] + static_cast<char>(x);
      tree->tokens.push_back(static_cast<int64_t>(x));
      tree->p.push_back(sampled(true, text));
      tree->q.push_back(sampled(false, text));
      texts->push_back(text);
      grow(tree, texts, use);
      tree->tokens.pop_back();
      tree->p.pop_back();
      tree->q.pop_back();
      texts->pop_back();
    }
    tree->probability = before;
    tree->shape.parents.pop_back();
  }

  // Nodes go from depth to depth, at each from path to path.
  int64_t parent_on_path(const ProposedTree& tree, size_t node) const {
    const size_t paths = static_cast<size_t>(tree_.paths);
    if (node < paths) return -1;
    size_t above = node - paths;
    for (size_t i = 0; i < above; ++i) {
      if (tree.tokens[i] == tree.tokens[above] &&
          tree.shape.parents[i] == tree.shape.parents[above])
        above = i;
    }
    return static_cast<int64_t>(above);
  }

  Emitted verified(const Text& text, const ProposedTree& proposed) {
    TreeVerification verification(tree_, text, proposed);
    Emitted emitted;
    visit(&verification, proposed, 0, 0, 1.0, &emitted);
    ++verifications_;
    Emitted formula = formula_(proposed.shape, proposed);
    for (const auto& [tokens, p] : emitted) formula[tokens] -= p;
    for (const auto& [tokens, difference] : formula)
      worst_ = std::max(worst_, std::fabs(difference));
    return emitted;
  }

  // The outcomes at a row of the walk, with the bits that led there.
  void visit(TreeVerification* v, const ProposedTree& tree, int64_t row, int64_t depth,
             double reached, Emitted* emitted) {
    const int64_t n = static_cast<int64_t>(tree.tokens.size());
    const std::vector<int64_t> children = children_of(tree, row);
    Distribution r = tree.p[static_cast<size_t>(row)];
    const Distribution& q = tree.q[static_cast<size_t>(row)];
    const bool tested = tree.shape.drawn[static_cast<size_t>(row)] && !children.empty() &&
                        tree_.sampling.temperature.value > 0.0f;
    if (tested && tree_.rule == polyspec::Rule::kBlock)
      return visit_paths(v, tree, row, depth, reached, emitted);
    for (size_t j = 0; tested && j < children.size(); ++j) {
      const int64_t child = children[j];
      const size_t x = static_cast<size_t>(tree.tokens[static_cast<size_t>(child)]);
      const Edge edge = find_edge(
          [&](uint64_t value) {
            v->bits(child) = value;
            return v->run() > depth && v->node(depth) == child;
          },
          r[x] / q[x]);
      const double a = edge.fraction();
      v->bits(child) = 0;
      if (a > 0.0) visit(v, tree, child + 1, depth + 1, reached * a, emitted);
      v->bits(child) = ~uint64_t{0};
      reached *= 1.0 - a;
      if (reached == 0.0) return;
      r = normalised(left_over(r, q));
    }
    visit_token(v, tree, row, depth, tested, r, reached, emitted);
    v->bits(n + depth) = 0;
  }

  static std::vector<int64_t> children_of(const ProposedTree& tree, int64_t row) {
    std::vector<int64_t> children;
    for (size_t i = 0; i < tree.tokens.size(); ++i) {
      if (tree.shape.parents[i] == row - 1) children.push_back(static_cast<int64_t>(i));
    }
    return children;
  }

  // The token at a row where no child is tested any more, and its outcome. `r`: a guess.
  void visit_token(TreeVerification* v, const ProposedTree& tree, int64_t row, int64_t depth,
                   bool tested, const Distribution& r, double reached, Emitted* emitted) {
    const int64_t n = static_cast<int64_t>(tree.tokens.size());
    const auto token_at = [&](uint64_t value) {
      v->bits(n + depth) = value;
      const int64_t accepted = v->run();
      if (tested) CHECK_EQ(depth, accepted);
      CHECK_EQ(row, v->row(depth));
      if (v->status() != 0 && tested) CHECK_BELOW(1e-14, reached);
      return v->token(depth);
    };
    std::vector<uint64_t> first_bits;
    const Distribution found = find_distribution(token_at, r, &first_bits);
    for (size_t x = 0; x < found.size(); ++x) {
      if (found[x] == 0.0) continue;
      token_at(first_bits[x]);
      if (v->run() > depth) {
        visit(v, tree, v->node(depth) + 1, depth + 1, reached * found[x], emitted);
      } else {
        (*emitted)[v->emitted()] += reached * found[x];
      }
    }
  }

  // The same by the block rule, below a row with drawn children. A node is accepted where its test
  // succeeds and the tests before it have failed; if all succeed, the next node shows.
  void visit_paths(TreeVerification* v, const ProposedTree& tree, int64_t row, int64_t depth,
                   double reached, Emitted* emitted) {
    const int64_t n = static_cast<int64_t>(tree.tokens.size());
    std::vector<int64_t> depths(static_cast<size_t>(n + 1), -1);  // of rows that are drawn below
    depths[static_cast<size_t>(row)] = depth;
    for (int64_t i = 0; i < n; ++i) {
      const size_t above = static_cast<size_t>(tree.shape.parents[static_cast<size_t>(i)] + 1);
      if (depths[above] < 0 || !tree.shape.drawn[above]) continue;
      depths[static_cast<size_t>(i + 1)] = depths[above] + 1;
      v->bits(i) = 0;
    }
    const auto stands = [&] {
      const int64_t accepted = v->run();
      int64_t last = row;
      for (int64_t d = depth; d < accepted && depths[static_cast<size_t>(v->node(d) + 1)] > 0; ++d)
        last = v->node(d) + 1;
      return last;
    };
    while (reached > 0.0) {
      const int64_t at = stands();
      const size_t index = static_cast<size_t>(at);
      double a = 1.0;
      if (at != row) {
        a = find_edge(
                [&](uint64_t value) {
                  v->bits(at - 1) = value;
                  return stands() == at;
                },
                0.5)
                .fraction();
        v->bits(at - 1) = 0;
      }
      if (tree.shape.drawn[index] && !children_of(tree, at).empty()) {
        visit_token(v, tree, at, depths[index], true, tree.p[index], reached * a, emitted);
      } else {
        visit(v, tree, at, depths[index], reached * a, emitted);
      }
      v->bits(n + depths[index]) = 0;
      if (at == row) break;
      v->bits(at - 1) = ~uint64_t{0};
      reached *= 1.0 - a;
    }
  }

  ToyTree tree_;
  TreeRule formula_;
  std::unordered_map<Text, Distribution> sampled_[2];
  std::unordered_map<Text, Emitted> rounds_;
  double worst_ = 0.0;
  size_t verifications_ = 0;
};

}  // namespace enumeration
