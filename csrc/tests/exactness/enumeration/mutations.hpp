// Chains with one deliberate mistake each: rules that published code or a first idea would use and
// that change the distribution of the text. They show that the enumeration finds these mistakes.
#pragma once

#include <memory>

#include "chain.hpp"

namespace enumeration {

// The target verifies with the drafter's distribution and not with that of the level that emitted
// the tokens.
class DrafterDistributionAtTarget : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                              const std::vector<polyspec::RowStatistics>& statistics) override {
    if (level != 0) return Enumerator::verify(level, text, pending, statistics);
    const int drafter = chain().count() - 1;
    std::vector<polyspec::RowStatistics> drafted;
    for (size_t i = 0; i < pending.size(); ++i) {
      drafted.push_back(sampled(drafter, text + pending.substr(0, i)).row_statistics);
    }
    return verify_against(0, drafter, text, pending, drafted);
  }
};

// After a rejection the middle level draws from p2 itself and not from the residual.
class NoResidual : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                              const std::vector<polyspec::RowStatistics>& statistics) override {
    std::vector<Outcome> outcomes = Enumerator::verify(level, text, pending, statistics);
    if (level != 1) return outcomes;
    std::vector<Outcome> mutated;
    for (const Outcome& o : outcomes) {
      if (o.accepted == static_cast<int64_t>(pending.size())) {
        mutated.push_back(o);
        continue;
      }
      const Distribution& distribution =
          sampled(level, text + pending.substr(0, o.accepted)).distribution;
      for (size_t x = 0; x < distribution.size(); ++x) {
        mutated.push_back(o);
        mutated.back().tokens.back() = static_cast<int64_t>(x);
        mutated.back().probability *= distribution[x];
      }
    }
    return mutated;
  }
};

// The middle level's correction is dropped before the target sees it, unless it is all there is.
class NoCorrection : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                              const std::vector<polyspec::RowStatistics>& statistics) override {
    std::vector<Outcome> outcomes = Enumerator::verify(level, text, pending, statistics);
    if (level != 1) return outcomes;
    for (Outcome& o : outcomes) {
      if (o.accepted == 0 || o.accepted == static_cast<int64_t>(pending.size())) continue;
      o.tokens.pop_back();
      o.statistics.pop_back();
    }
    return outcomes;
  }
};

// The drafter samples all its tokens and then drops the first unlikely token and all after it.
class DroppedTail : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Proposal> propose(const Text& text, int64_t count) override {
    constexpr double kConfident = 0.3;
    std::vector<Proposal> all = Enumerator::propose(text, count);
    for (Proposal& proposal : all) {
      Text before = text;
      size_t kept = 0;
      for (int64_t token : proposal.tokens) {
        if (sampled(chain().count() - 1, before).distribution[token] < kConfident) break;
        before.push_back(static_cast<char>(token));
        ++kept;
      }
      proposal.tokens.resize(kept);
      proposal.statistics.resize(kept);
    }
    return all;
  }
};

// The middle level keeps every draft token that is typical of p2 (Medusa's test, epsilon .3, delta
// .6), for any distribution of the drafter; the target still treats the tokens as a sample of p2.
class TypicalAcceptance : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                              const std::vector<polyspec::RowStatistics>& statistics) override {
    if (level != 1) return Enumerator::verify(level, text, pending, statistics);
    Outcome kept;
    Text before = text;
    for (char token : pending) {
      const SampledRow& row = sampled(level, before);
      double entropy = 0.0;
      for (double p : row.distribution) entropy -= p > 0.0 ? p * std::log(p) : 0.0;
      if (row.distribution[token] < std::min(0.3, 0.6 * std::exp(-entropy))) break;
      kept.tokens.push_back(token);
      kept.statistics.push_back(row.row_statistics);
      before.push_back(token);
    }
    kept.accepted = static_cast<int64_t>(kept.tokens.size());
    const SampledRow& row = sampled(level, before);
    std::vector<Outcome> outcomes;
    for (size_t x = 0; x < row.distribution.size(); ++x) {
      outcomes.push_back(kept);
      outcomes.back().tokens.push_back(static_cast<int64_t>(x));
      outcomes.back().statistics.push_back(row.row_statistics);
      outcomes.back().probability = row.distribution[x];
    }
    return outcomes;
  }
};

// The "hierarchical" rule as it was released (arXiv 2601.05724): block verification with a last
// test that takes the whole block with the plain product of the ratios, not with the product capped
// at 1 token by token. Claimed to be lossless and longer; right for one token only.
class UncappedLastTest : public Enumerator {
 public:
  using Enumerator::Enumerator;
  std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                              const std::vector<polyspec::RowStatistics>& statistics) override {
    if (level != 0 || pending.empty()) return Enumerator::verify(level, text, pending, statistics);
    const size_t k = pending.size();
    std::vector<Distribution> p, q;
    std::vector<int64_t> y(pending.begin(), pending.end());
    std::vector<polyspec::RowStatistics> rows;
    double product = 1.0;
    for (size_t i = 0; i <= k; ++i) {
      const Text before = text + pending.substr(0, i);
      p.push_back(sampled(0, before).distribution);
      rows.push_back(sampled(0, before).row_statistics);
      if (i == k) break;
      q.push_back(sampled(1, before).distribution);
      product *= p[i][static_cast<size_t>(y[i])] / q[i][static_cast<size_t>(y[i])];
    }
    Decisions decisions = reference_decisions(polyspec::Rule::kBlock, p, q, y);
    decisions.accept.back() = std::min(1.0, product);
    std::vector<Outcome> outcomes;
    double reached = 1.0;
    for (size_t kept = k + 1; kept-- > 0;) {
      const double h = kept > 0 ? decisions.accept[kept - 1] : 1.0;
      const Distribution& last = decisions.emit[kept];
      for (size_t x = 0; x < last.size() && h > 0.0; ++x) {
        if (last[x] == 0.0) continue;
        Outcome outcome{{y.begin(), y.begin() + static_cast<std::ptrdiff_t>(kept)},
                        {rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(kept) + 1},
                        static_cast<int64_t>(kept),
                        reached * h * last[x]};
        outcome.tokens.push_back(static_cast<int64_t>(x));
        outcomes.push_back(std::move(outcome));
      }
      reached *= 1.0 - h;
    }
    return outcomes;
  }
};

// Algorithm 1 of the polybasic paper as it is printed, for three levels: M_3 always drafts from the
// committed text; M_2 keeps the accepted prefix, without a correction, and tries again while fewer
// than mu tokens are accepted (so the block's distribution is that of a prefix of length mu or
// more); M_1 takes the block whole or draws one token.
class AlgorithmOne : public Enumerator {
 public:
  using Enumerator::Enumerator;

  TextDistribution texts(size_t mu, int64_t k, size_t length) {
    TextDistribution open{{Text(), 1.0}}, ended;
    while (!open.empty()) {
      TextDistribution following;
      const auto commit = [&](const Text& text, double probability) {
        if (text.size() >= length) {
          ended[text.substr(0, length)] += probability;
        } else {
          following[text] += probability;
        }
      };
      for (const auto& [text, probability] : open) {
        double all_blocks = 0.0;
        const TextDistribution blocks = accepted_blocks(text, mu, k, &all_blocks);
        for (const auto& [block, p] : blocks) {
          const double reached = probability * p / all_blocks;
          const double taken = acceptance(0, 1, text, block);
          commit(text + block, reached * taken);
          const Distribution& distribution = sampled(0, text).distribution;
          for (size_t x = 0; x < distribution.size(); ++x) {
            commit(text + static_cast<char>(x), reached * (1.0 - taken) * distribution[x]);
          }
        }
      }
      open = std::move(following);
    }
    return ended;
  }

 private:
  double ratio(int level, int draft, const Text& before, char token) {
    return std::min(1.0, sampled(level, before).distribution[token] /
                             sampled(draft, before).distribution[token]);
  }
  double acceptance(int level, int draft, const Text& text, const Text& block) {
    double all = 1.0;
    for (size_t i = 0; i < block.size(); ++i)
      all *= ratio(level, draft, text + block.substr(0, i), block[i]);
    return all;
  }
  TextDistribution accepted_blocks(const Text& text, size_t mu, int64_t k, double* total) {
    TextDistribution blocks;
    for (const Proposal& proposal : propose(text, k)) {
      Text block;
      double reached = proposal.probability;
      for (size_t i = 0;; ++i) {
        const bool end = i == proposal.tokens.size();
        const double a =
            end ? 0.0 : ratio(1, 2, text + block, static_cast<char>(proposal.tokens[i]));
        if (i >= mu) {
          blocks[block] += reached * (1.0 - a);
          *total += reached * (1.0 - a);
        }
        if (end) break;
        reached *= a;
        block.push_back(static_cast<char>(proposal.tokens[i]));
      }
    }
    return blocks;
  }
};

}  // namespace enumeration
