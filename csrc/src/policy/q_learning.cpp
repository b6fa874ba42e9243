#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"

namespace polyspec {
namespace policy {
namespace {

constexpr int kOutcomes = 4;  // nothing accepted, less than half, half or more, all
constexpr int kActions = 3;   // one down, stay, one up

// The table of one level, of all rows.
struct Table {
  std::vector<std::array<double, kActions>> values;  // [(window) * kOutcomes + outcome]

  std::array<double, kActions>& at(int64_t window, int outcome) {
    return values[static_cast<size_t>(window) * kOutcomes + static_cast<size_t>(outcome)];
  }
};

// Among equals, as at first, the action of the state machine (kFsm): up after a block that was
// accepted whole, down after a block of which less than half was. If up were the default, a drafter
// that is always wrong would draft more and more.
int best_of(const std::array<double, kActions>& values, int outcome) {
  int best = outcome == 3 ? 2 : outcome == 2 ? 1 : 0;
  for (int action = 0; action < kActions; ++action) {
    if (values[static_cast<size_t>(action)] > values[static_cast<size_t>(best)]) best = action;
  }
  return best;
}

class QLearning final : public AdaptivePolicy {
 public:
  explicit QLearning(PolicyOptions options) : AdaptivePolicy(std::move(options)) { forget(); }

 private:
  struct Level {
    int64_t window = 1;
    int outcome = 2;          // the initial windows stay, at first
    int64_t from_window = 1;  // the state and action of the round that is under way
    int from_outcome = 2;
    int action = -1;  // -1: none
  };
  using Row = std::vector<Level>;  // [n-1]

  void begin(int64_t row, const RoundReport&) override {
    at_row(rows_, row) = latest_;
    for (Level& level : at_row(rows_, row)) level.action = -1;
  }

  void learn(int64_t row, const RoundReport& report) override {
    double seconds = 0;
    Row& own = at_row(rows_, row);
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      seconds += step.seconds;
      const size_t at = static_cast<size_t>(step.level - 1);
      if (at >= own.size() || step.tokens == 0) continue;
      const bool half = 2 * step.accepted >= step.tokens;
      own[at].outcome = step.accepted == step.tokens ? 3 : half ? 2 : step.accepted > 0 ? 1 : 0;
    }
    double reward = static_cast<double>(report.num_tokens);
    if (seconds > 0) reward /= seconds;
    mean_ = mean_ == 0 ? reward : mean_ + kMeanRate * (reward - mean_);
    reward = mean_ > 0 ? reward / mean_ : 0;
    for (size_t i = 0; i < own.size(); ++i) {
      Level& level = own[i];
      if (level.action < 0) continue;
      const std::array<double, kActions>& next = tables_[i].at(level.window, level.outcome);
      const double ahead = next[static_cast<size_t>(best_of(next, level.outcome))];
      double& value =
          tables_[i].at(level.from_window, level.from_outcome)[static_cast<size_t>(level.action)];
      value += options().learning_rate * (reward + options().discount * ahead - value);
      level.action = -1;
    }
    latest_ = own;
  }

  void choose(const Choice& choice, int64_t* windows) override {
    Row& own = at_row(rows_, choice.rows.front());
    for (size_t i = 0; i < own.size(); ++i) {
      Level& level = own[i];
      level.from_window = level.window;
      level.from_outcome = level.outcome;
      const double chance = uniform();
      level.action = chance < options().exploration
                         ? static_cast<int>(uniform() * kActions)
                         : best_of(tables_[i].at(level.window, level.outcome), level.outcome);
      level.window =
          std::clamp<int64_t>(level.window + level.action - 1, 1, options().max_windows[i]);
      windows[i] = level.window;
    }
  }

  void forget() override {
    rows_.clear();
    latest_.assign(static_cast<size_t>(count()), {});
    tables_.assign(static_cast<size_t>(count()), {});
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t most = options().max_windows[i];
      latest_[i].window = std::clamp<int64_t>(options().windows[i], 1, most);
      // Values begin at the mean of possible returns, so that no action is preferred.
      const double start = 1 / (1 - options().discount);
      tables_[i].values.assign(static_cast<size_t>(most + 1) * kOutcomes, {start, start, start});
    }
    mean_ = 0;
    draws_ = 0;
  }

  // In [0, 1). Not a draw of tokens, so it needs no key of the chain's.
  double uniform() {
    uint64_t z = options().seed + 0x9e3779b97f4a7c15u * ++draws_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }

  static constexpr double kMeanRate = 0.05;
  std::vector<Row> rows_;
  Row latest_;
  std::vector<Table> tables_;
  double mean_ = 0;  // of the rewards, running
  uint64_t draws_ = 0;
};

}  // namespace

std::unique_ptr<WindowPolicy> make_q_learning(PolicyOptions options) {
  return std::make_unique<QLearning>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
