#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"
#include "policy/renewal_steps.hpp"

namespace polyspec {
namespace policy {
namespace {

constexpr size_t kPositions = 32;  // later ones count as the last
constexpr double kUnknown = 0.7;   // acceptance before anything was verified
constexpr double kUnknownWeight = 10;
constexpr double kSharedWeight = 8;   // of all rows in a row's estimate, in tokens
constexpr double kPooledWeight = 48;  // of all positions in a position's
constexpr double kSlower = 8;         // of a level's estimates of all rows, and of its positions
constexpr double kIdle = 0.97;        // a round in which a level verified nothing

double odds(double p) { return p / (1 - p); }

// Tokens accepted, and tokens that a verification came to.
struct Counts {
  double accepted = 0, reached = 0;

  void decay(double by) {
    accepted *= by;
    reached *= by;
  }
  void add(int64_t tokens, int64_t won) {
    accepted += static_cast<double>(won);
    reached += static_cast<double>(won + (won < tokens ? 1 : 0));
  }
  // With `weight` tokens of which a share of `prior` was accepted.
  double share(double prior, double weight) const {
    return (accepted + weight * prior) / (reached + weight);
  }
};

// One level over all rows.
struct Shared {
  Counts all;
  std::array<Counts, kPositions> at{};

  void add(double forgetting, int64_t tokens, int64_t won) {
    all.decay(forgetting);
    all.add(tokens, won);
    for (Counts& one : at) one.decay(forgetting);
    for (int64_t j = 0; j < std::min(tokens, won + 1); ++j) {
      Counts& one = at[std::min(static_cast<size_t>(j), kPositions - 1)];
      one.reached += 1;
      one.accepted += j < won ? 1 : 0;
    }
  }
};

// Part of a chain, from a level downwards, with windows.
struct Candidate {
  Lengths block;                 // what its topmost level emits; of the target not kept
  double tokens = 0;             // the mean of that
  double seconds = 0;            // of a pass of that level and all below it
  std::vector<int64_t> windows;  // of that level first

  bool cheaper(const Candidate& other) const {
    return seconds * other.tokens < other.seconds * tokens;
  }
};

class Joint final : public AdaptivePolicy {
 public:
  explicit Joint(PolicyOptions options) : AdaptivePolicy(std::move(options)) { forget(); }

 private:
  using Row = std::vector<Counts>;  // [n-1]

  void begin(int64_t row, const RoundReport&) override {
    at_row(rows_, row).assign(static_cast<size_t>(count()), {});
  }

  void learn(int64_t row, const RoundReport& report) override {
    Row& own = at_row(rows_, row);
    const double keep = options().forgetting;
    const double keep_shared = 1 - (1 - keep) / kSlower;
    std::vector<bool> verified(own.size(), false);
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      const size_t at = static_cast<size_t>(step.level - 1);
      if (at >= own.size() || step.tokens == 0) continue;
      own[at].decay(keep);
      own[at].add(step.tokens, step.accepted);
      shared_[at].add(keep_shared, step.tokens, step.accepted);
      verified[at] = true;
    }
    for (size_t i = 0; i < own.size(); ++i) {
      if (verified[i]) continue;
      own[i].decay(kIdle);
      shared_[i].all.decay(kIdle);
    }
  }

  // [j]: the probability that the first j tokens of a block are accepted, j up to `most`.
  std::vector<double> survival(const Counts& own, const Shared& shared, int64_t most) const {
    const double all = shared.all.share(kUnknown, kUnknownWeight);
    const double now = own.share(all, kSharedWeight);
    std::vector<double> out(static_cast<size_t>(most) + 1);
    out[0] = 1;
    for (size_t j = 0; j < static_cast<size_t>(most); ++j) {
      const double slow = shared.at[std::min(j, kPositions - 1)].share(all, kPooledWeight);
      // How much better or worse a position does than all of them is slow to change; how well all
      // of them do is not.
      const double x = odds(now) * odds(slow) / odds(all);
      out[j + 1] = out[j] * std::min(options().max_acceptance, x / (1 + x));
    }
    return out;
  }

  void choose(int64_t row, int64_t batch, bool some, int64_t* windows) override {
    std::copy(options().windows.begin(), options().windows.end(), windows);
    if (times().at(1, batch).seconds(0) <= 0) return;  // no times yet
    const Row& own = at_row(rows_, row);
    std::vector<Candidate> below;
    for (int32_t level = count(); level >= 1; --level) {
      const size_t i = static_cast<size_t>(level - 1);
      Search search{survival(own[i], shared_[i], longest(i, below)),
                    times().at(level, batch),
                    level == 1,
                    windows_of(row),
                    {},
                    {},
                    {}};
      if (!(some && level == 1)) search.add({1.0}, 0, 0, nullptr);
      if (level == count()) {
        const WidthTimes& draft = times().at(levels(), batch);
        for (int64_t k = 1; k <= options().max_windows[i]; ++k) {
          search.add(exactly(k), k, draft.seconds(k), nullptr);
        }
      }
      for (const Candidate& one : below) {
        const int64_t block = one.windows[0] + 1;
        pending_.assign(1, 1.0);
        for (int64_t r = 1; r == 1 || r * block <= options().max_windows[i]; ++r) {
          join(pending_, one.block, &joined_);
          std::swap(pending_, joined_);
          search.add(pending_, std::min(r * block, options().max_windows[i]),
                     static_cast<double>(r) * one.seconds, &one);
        }
      }
      if (level == 1) {
        const std::vector<int64_t>& chosen = search.settled().windows;
        std::copy(chosen.begin(), chosen.end(), windows);
        return;
      }
      below = std::move(search.found);
      const size_t kept = level == 2 && count() == 2 ? kKept : kKeptDeep;
      if (below.size() > kept) {
        std::sort(below.begin(), below.end(),
                  [](const Candidate& a, const Candidate& b) { return a.cheaper(b); });
        below.resize(kept);
      }
    }
  }

  // The candidates of one level.
  struct Search {
    std::vector<double> reach;  // [j]: the probability that j tokens are accepted
    const WidthTimes& verify;
    bool top;                         // the target: only the best is wanted
    const std::vector<int64_t>& now;  // windows of the row
    std::vector<Candidate> found;
    Candidate best, same;  // of the target: of all, and with the windows in use

    void add(const Lengths& pending, int64_t window, double gathered, const Candidate* below) {
      const auto survives = [this](size_t j) { return reach[j]; };
      Candidate made;
      made.seconds = gathered + verify.between(mean(pending));
      made.tokens = emitted_mean(pending, survives);
      const bool used = top && window == now[0] &&
                        (below == nullptr ||
                         std::equal(below->windows.begin(), below->windows.end(), now.begin() + 1));
      if (top && !used && best.tokens > 0 && !made.cheaper(best)) return;
      if (!top) made.block = emitted(pending, survives);
      made.windows.push_back(window);
      if (below != nullptr) {
        made.windows.insert(made.windows.end(), below->windows.begin(), below->windows.end());
      }
      if (!top) {
        found.push_back(std::move(made));
        return;
      }
      if (used) same = made;
      if (best.tokens == 0 || made.cheaper(best)) best = std::move(made);
    }

    // The best, or what the row has now where the best is hardly better: each change may cost a
    // device a new graph, and the estimates are no better than that.
    const Candidate& settled() const {
      const bool stay =
          same.tokens > 0 && same.seconds * best.tokens * kWorthwhile <= best.seconds * same.tokens;
      return stay ? same : best;
    }
  };

  // The longest block that can be pending for level i + 1.
  int64_t longest(size_t i, const std::vector<Candidate>& below) const {
    int64_t most = options().max_windows[i];
    for (const Candidate& one : below) {
      most = std::max<int64_t>(most, static_cast<int64_t>(one.block.size()) - 1);
    }
    return most + most;  // a last block may overshoot
  }

  void forget() override {
    rows_.clear();
    shared_.assign(static_cast<size_t>(count()), {});
  }

  // Candidates of a level that the one above tries; of longer chains fewer.
  static constexpr size_t kKept = 17, kKeptDeep = 6;
  static constexpr double kWorthwhile = 0.99;  // of the seconds per token of the windows in use
  std::vector<Row> rows_;
  std::vector<Shared> shared_;  // [n-1]
  Lengths pending_, joined_;    // room for a search
};

}  // namespace

std::unique_ptr<WindowPolicy> make_joint(PolicyOptions options) {
  return std::make_unique<Joint>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
