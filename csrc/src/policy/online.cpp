#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"

namespace polyspec {
namespace policy {
namespace {

// The last verifications of a level.
class History {
 public:
  void add(int64_t most, int64_t tokens, int64_t accepted) {
    if (static_cast<int64_t>(latest_.size()) == most) forget();
    latest_.push_back({accepted, accepted < tokens ? 1 : 0});
    accepted_ += latest_.back().accepted;
    rejected_ += latest_.back().rejected;
  }
  // The oldest of them.
  void forget() {
    if (latest_.empty()) return;
    accepted_ -= latest_.front().accepted;
    rejected_ -= latest_.front().rejected;
    latest_.pop_front();
  }
  // Acceptance per token. Until there are `most` verifications it leans on `unknown`, or the first
  // block that fails would be the last that is tried.
  double acceptance(int64_t most, double cap, double unknown) const {
    const double share = static_cast<double>(latest_.size()) / static_cast<double>(most);
    const double weight = kUnknownWeight * (1 - share);
    const double seen = static_cast<double>(accepted_ + rejected_) + weight;
    if (seen <= 0) return unknown;
    return std::min(cap, (static_cast<double>(accepted_) + weight * unknown) / seen);
  }

 private:
  static constexpr double kUnknownWeight = 8;  // tokens
  struct Verified {
    int64_t accepted = 0, rejected = 0;
  };
  std::deque<Verified> latest_;
  int64_t accepted_ = 0, rejected_ = 0;
};

class Online final : public AdaptivePolicy {
 public:
  explicit Online(PolicyOptions options) : AdaptivePolicy(std::move(options)) {}

 private:
  using Row = std::vector<History>;  // [n-1]

  void begin(int64_t row, const RoundReport&) override {
    if (latest_.empty()) latest_.resize(static_cast<size_t>(count()));
    at_row(rows_, row) = latest_;  // as the row that reported last left off
  }

  void learn(int64_t row, const RoundReport& report) override {
    Row& own = at_row(rows_, row);
    std::vector<bool> alone(own.size(), false);
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      if (step.level == levels() || catches_up(step)) continue;
      const size_t at = static_cast<size_t>(step.level - 1);
      if (step.tokens > 0) {
        own[at].add(options().history, step.tokens, step.accepted);
      } else {
        alone[at] = true;
      }
    }
    // A level with a window of 0 measures nothing of the level below, which would never draft
    // again. (The guard handles the target's window.)
    for (size_t i = 1; i < own.size(); ++i) {
      if (alone[i] && windows_of(row)[i] == 0) own[i].forget();
    }
    latest_ = own;
  }

  void choose(const Choice& choice, int64_t* windows) override {
    std::copy(options().windows.begin(), options().windows.end(), windows);
    const int64_t batch = choice.batch;
    if (times().at(1, batch).seconds(0) <= 0) return;  // no times yet
    // One round of the level below: tokens that it hands up, seconds that it takes, and the tokens
    // that it hands up if all is accepted.
    double block = 1, spent = 0;
    int64_t full = 1;
    for (int32_t level = count(); level >= 1; --level) {
      const size_t i = static_cast<size_t>(level - 1);
      const WidthTimes& verify = times().at(level, batch);
      const WidthTimes& draft = times().at(level + 1, batch);
      double a = 0;  // of the rows' tokens, on average
      for (const int64_t row : choice.rows) {
        a +=
            at_row(rows_, row)[i].acceptance(options().history, options().max_acceptance, kUnknown);
      }
      a /= static_cast<double>(choice.rows.size());
      const int64_t most = options().max_windows[i];
      const bool lowest = level == count();
      double tokens = 0, seconds = 0;  // of the best
      // r tokens of the drafter, or r rounds of the level below.
      for (int64_t r = choice.some && level == 1 ? 1 : 0; r <= 1 || r * full <= most; ++r) {
        const double g = static_cast<double>(r) * block;
        const double gain = (1 - std::pow(a, g + 1)) / (1 - a);
        double took = verify.between(g) + static_cast<double>(r) * spent;
        if (lowest && r > 0) took += draft.seconds(r);
        if (tokens > 0 && took * tokens >= seconds * gain) continue;
        windows[i] = std::min(r * full, most);
        seconds = took;
        tokens = gain;
      }
      block = tokens;
      spent = seconds;
      full = windows[i] + 1;
    }
  }

  bool by_times() const override { return true; }

  void forget() override {
    rows_.clear();
    latest_.clear();
  }

  static constexpr double kUnknown = 0.7;
  std::vector<Row> rows_;
  Row latest_;
};

}  // namespace

std::unique_ptr<WindowPolicy> make_online(PolicyOptions options) {
  return std::make_unique<Online>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
