// Enumerates everything a chain of toy models can emit, with its probability.
//
// The production Scheduler names the next step and the production sample and verify run it; this
// file only keeps the state of a real driver: the committed text, and per level the pending tokens
// with the distributions they came from. States that agree in all of that are merged.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "outcomes.hpp"
#include "polyspec/scheduler.hpp"
#include "toy_models.hpp"

namespace enumeration {

using TextDistribution = std::map<Text, double>;

inline double total_variation(const TextDistribution& a, const TextDistribution& b) {
  double sum = 0.0;
  for (const auto& [text, p] : a) {
    const auto other = b.find(text);
    sum += std::fabs(p - (other == b.end() ? 0.0 : other->second));
  }
  for (const auto& [text, p] : b) sum += a.count(text) == 0 ? p : 0.0;
  return sum / 2.0;
}

// The distribution of one row as polyspec::sample draws from it, and the RowStatistics it hands up.
struct SampledRow {
  Distribution distribution;
  polyspec::RowStatistics row_statistics{};
};

class Enumerator {
 public:
  explicit Enumerator(ToyChain chain) : chain_(std::move(chain)), rows_(chain_.count()) {}
  virtual ~Enumerator() = default;

  struct Run {
    TextDistribution texts;      // distribution of the emitted texts of up to max_new_tokens tokens
    double target_passes = 0.0;  // expected number of verifications by the target
    double emitted = 0.0;        // expected number of tokens
  };

  // Windows in force at a state, from the pending tokens; called before every step if set.
  using Policy = std::function<std::vector<int64_t>(const std::vector<Text>& pending)>;

  // `rounds` as of Scheduler; none: no level is bounded.
  Run run(const std::vector<int64_t>& windows, int64_t max_new_tokens,
          const Policy& policy = nullptr, const std::vector<int64_t>& rounds = {}) {
    State begin{polyspec::Scheduler(windows, rounds),
                std::vector<Text>(windows.size() + 1),
                {},
                std::vector<int64_t>(rounds.size(), 0),
                false,
                1.0};
    begin.statistics.resize(windows.size() + 1);
    begin.scheduler.start(max_new_tokens);
    Run result;
    Layer layer;
    layer.emplace(begin.key(), begin);
    while (!layer.empty()) {
      Layer following;
      for (auto& [key, state] : layer) {
        if (policy)
          state.scheduler.set_windows(policy({state.texts.begin() + 1, state.texts.end()}));
        const polyspec::Step step = state.scheduler.next();
        if (step.kind == polyspec::Step::Kind::kDone) {
          result.texts[state.texts[0]] += state.probability;
          result.emitted += state.probability * static_cast<double>(state.texts[0].size());
          continue;
        }
        if (step.level == 1) result.target_passes += state.probability;
        if (step.kind == polyspec::Step::Kind::kDraft) {
          draft(state, step, &following);
        } else {
          verify_pending(state, step, &following);
        }
      }
      layer = std::move(following);
    }
    return result;
  }

  // The target's distribution, by polyspec::sample token after token.
  TextDistribution target_statistics(int64_t max_new_tokens) {
    return autoregressive(max_new_tokens,
                          [this](const Text& text) { return sampled(0, text).distribution; });
  }
  // The same in plain double arithmetic.
  TextDistribution softmax_distribution(int64_t max_new_tokens) {
    return autoregressive(max_new_tokens, [this](const Text& text) {
      return processed_distribution(chain_.levels[0].after(text), chain_.vocab(), chain_.sampling);
    });
  }

  const ToyChain& chain() const { return chain_; }
  double worst_deviation() const { return worst_deviation_; }     // of verify from the formulas
  size_t verifications() const { return verifications_.size(); }  // distinct verifications

  struct Proposal {
    std::vector<int64_t> tokens;
    std::vector<polyspec::RowStatistics> statistics;
    double probability = 1.0;
  };

  // All proposals of up to `count` tokens after `text`. They end at an EOS, which stays.
  virtual std::vector<Proposal> propose(const Text& text, int64_t count) {
    std::vector<Proposal> all;
    grow(text, count, {}, &all);
    return all;
  }

  // All outcomes of verifying `pending` after `text` at `level` (0 is the target here).
  virtual std::vector<Outcome> verify(int level, const Text& text, const Text& pending,
                                      const std::vector<polyspec::RowStatistics>& statistics) {
    return verify_against(level, level + 1, text, pending, statistics);
  }

 protected:
  // Verifies with the rows of chain level `draft` as the proposal's.
  std::vector<Outcome> verify_against(int level, int draft, const Text& text, const Text& pending,
                                      const std::vector<polyspec::RowStatistics>& statistics) {
    const int64_t k = static_cast<int64_t>(pending.size());
    const int64_t vocab = chain_.vocab();
    const ToyModel& drafter = chain_.levels[draft];
    const bool is_last = draft == chain_.count() - 1;
    const bool no_logits = is_last && chain_.deterministic_drafter;
    std::vector<float> p_rows, q_rows;  // [k+1, vocab], [k, draft vocab]
    std::vector<Distribution> p, q;
    std::vector<int64_t> y;
    Text before = text;
    for (int64_t i = 0; i <= k; ++i) {
      const float* row = chain_.levels[level].after(before);
      p_rows.insert(p_rows.end(), row, row + vocab);
      p.push_back(sampled(level, before).distribution);
      if (i == k) break;
      const float* draft_row = drafter.after(before);
      q_rows.insert(q_rows.end(), draft_row, draft_row + drafter.vocab());
      y.push_back(pending[i]);
      q.push_back(no_logits ? Distribution(vocab, 0.0) : on_target_ids(draft, before));
      if (no_logits) q.back()[y[i]] = 1.0;
      before.push_back(pending[i]);
    }
    polyspec::VerifyParams params;
    params.draft_len = k;
    params.vocab = vocab;
    params.draft_vocab = drafter.vocab();
    params.target_logits = p_rows.data();
    params.target_stride[1] = vocab;
    params.draft_logits = no_logits ? nullptr : q_rows.data();
    params.draft_stride[1] = drafter.vocab();
    params.draft_statistics = chain_.hand_up_statistics && !no_logits ? statistics.data() : nullptr;
    params.target_to_draft = is_last && !chain_.draft_of.empty() ? chain_.draft_of.data() : nullptr;
    params.draft_tokens = y.data();
    params.sampling = chain_.sampling;
    params.rule = chain_.rule;
    const Decisions formula = reference_decisions(chain_.rule, p, q, y);
    std::vector<Outcome> outcomes = find_outcomes(params, formula);
    worst_deviation_ = std::max(worst_deviation_, deviation(chain_.rule, outcomes, formula));
    return outcomes;
  }

  // The distribution of `level` after `text`. The drafter's is over its ids.
  const SampledRow& sampled(int level, const Text& text) {
    const auto [at, fresh] = rows_[level].try_emplace(context(text));
    if (fresh) {
      polyspec::SampleParams params;
      params.vocab = chain_.levels[level].vocab();
      params.logits = chain_.levels[level].after(text);
      params.sampling = chain_.sampling;
      at->second.distribution = find_sample_distribution(params, &at->second.row_statistics);
    }
    return at->second;
  }

  int64_t target_id(int64_t draft_token) const {
    for (size_t x = 0; x < chain_.draft_of.size(); ++x) {
      if (chain_.draft_of[x] == draft_token) return static_cast<int64_t>(x);
    }
    return draft_token;
  }

 private:
  struct State {
    polyspec::Scheduler scheduler;
    std::vector<Text> texts;  // [0]: committed; [i]: pending for level i
    std::vector<std::vector<polyspec::RowStatistics>>
        statistics;               // of the pending tokens, from the level below
    std::vector<int64_t> blocks;  // handed up to level i+1 since it verified; empty without bounds
    bool closed;                  // the drafter proposed fewer than asked
    double probability;

    Text key() const {  // the distributions follow from the texts
      Text key(1, closed ? '1' : '0');
      for (const Text& text : texts) (key += text) += '|';
      // With a bound, the next step depends on them. They are few: a character each will do.
      for (int64_t count : blocks) key += static_cast<char>(count);
      return key;
    }
    Text prefix(
        int32_t through) const {  // committed text and tokens pending for levels 1 ... through
      Text all;
      for (int32_t i = 0; i <= through; ++i) all += texts[i];
      return all;
    }
  };
  using Layer = std::unordered_map<Text, State>;

  static void add(State state, Layer* layer) {
    const auto [at, fresh] = layer->try_emplace(state.key(), state);
    if (!fresh) at->second.probability += state.probability;
  }

  static Text context(const Text& text) {
    return text.size() <= 2 ? text : text.substr(text.size() - 2);
  }

  // Hands `tokens` of the level `from` (1-based) up, cut after the first EOS.
  void hand_up(State state, int32_t from, const std::vector<int64_t>& tokens,
               const std::vector<polyspec::RowStatistics>& statistics, Layer* layer) const {
    int64_t emitted = 0;
    bool eos = false;
    while (emitted < static_cast<int64_t>(tokens.size()) && !eos) {
      eos = tokens[emitted] == chain_.eos;
      state.texts[from - 1].push_back(static_cast<char>(tokens[emitted]));
      state.statistics[from - 1].push_back(statistics[emitted]);
      ++emitted;
    }
    if (from == 1) state.statistics[0].clear();
    if (from > 1 && !state.blocks.empty()) ++state.blocks[from - 2];
    state.scheduler.report(from, emitted, eos);
    add(std::move(state), layer);
  }

  void draft(const State& state, const polyspec::Step& step, Layer* layer) {
    const Text text = state.prefix(step.level - 1);
    for (const Proposal& proposal : propose(text, step.count)) {
      State next = state;
      next.probability *= proposal.probability;
      next.closed = static_cast<int64_t>(proposal.tokens.size()) < step.count;
      hand_up(std::move(next), step.level, proposal.tokens, proposal.statistics, layer);
    }
  }

  void verify_pending(const State& state, const polyspec::Step& step, Layer* layer) {
    const Text text = state.prefix(step.level - 1);
    const Text& pending = state.texts[step.level];
    CHECK_EQ(step.count, static_cast<int64_t>(pending.size()));
    const Text key = std::to_string(step.level) + context(text) + '|' + pending;
    const auto [at, fresh] = verifications_.try_emplace(key);
    if (fresh) at->second = verify(step.level - 1, text, pending, state.statistics[step.level]);
    for (const Outcome& outcome : at->second) {
      State next = state;
      next.probability *= outcome.probability;
      next.texts[step.level].clear();
      next.statistics[step.level].clear();
      if (!next.blocks.empty()) next.blocks[step.level - 1] = 0;
      if (step.level == chain_.count() - 1) next.closed = false;
      hand_up(std::move(next), step.level, outcome.tokens, outcome.statistics, layer);
    }
  }

  void grow(const Text& text, int64_t count, Proposal so_far, std::vector<Proposal>* all) {
    const bool ended = !so_far.tokens.empty() && so_far.tokens.back() == chain_.eos;
    if (count == 0 || ended) {
      all->push_back(std::move(so_far));
      return;
    }
    const int last = chain_.count() - 1;
    const SampledRow& row = sampled(last, text);
    const int64_t best = std::max_element(row.distribution.begin(), row.distribution.end()) -
                         row.distribution.begin();
    for (int64_t x = 0; x < chain_.levels[last].vocab(); ++x) {
      const double p = chain_.deterministic_drafter ? (x == best ? 1.0 : 0.0) : row.distribution[x];
      if (p == 0.0) continue;
      Proposal longer = so_far;
      longer.tokens.push_back(target_id(x));
      longer.statistics.push_back(row.row_statistics);
      longer.probability *= p;
      grow(text + static_cast<char>(target_id(x)), count - 1, std::move(longer), all);
    }
  }

  Distribution on_target_ids(int level, const Text& text) {
    const Distribution& distribution = sampled(level, text).distribution;
    const bool drafter = level == chain_.count() - 1;
    Distribution mapped(chain_.vocab(), 0.0);
    for (size_t x = 0; x < distribution.size(); ++x)
      mapped[drafter ? target_id(x) : x] = distribution[x];
    return mapped;
  }

  template <class RowDistributionAfter>
  TextDistribution autoregressive(int64_t max_new_tokens,
                                  RowDistributionAfter&& distribution_after) const {
    TextDistribution open{{Text(), 1.0}}, ended;
    for (int64_t i = 0; i < max_new_tokens; ++i) {
      TextDistribution longer;
      for (const auto& [text, probability] : open) {
        const Distribution distribution = distribution_after(text);
        for (size_t x = 0; x < distribution.size(); ++x) {
          if (distribution[x] == 0.0) continue;
          TextDistribution& into = static_cast<int>(x) == chain_.eos ? ended : longer;
          into[text + static_cast<char>(x)] = probability * distribution[x];
        }
      }
      open = std::move(longer);
    }
    open.insert(ended.begin(), ended.end());
    return open;
  }

  ToyChain chain_;
  std::vector<std::unordered_map<Text, SampledRow>> rows_;        // [level][context]
  std::unordered_map<Text, std::vector<Outcome>> verifications_;  // by level, context and pending
  double worst_deviation_ = 0.0;
};

}  // namespace enumeration
