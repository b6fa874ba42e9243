#include <algorithm>
#include <cmath>
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
    if (static_cast<int64_t>(latest_.size()) < most) {
      latest_.push_back({});
    } else {
      accepted_ -= latest_[at_].accepted;
      rejected_ -= latest_[at_].rejected;
    }
    latest_[at_] = {accepted, accepted < tokens ? 1 : 0};
    accepted_ += latest_[at_].accepted;
    rejected_ += latest_[at_].rejected;
    at_ = (at_ + 1) % static_cast<size_t>(most);
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
  std::vector<Verified> latest_;
  size_t at_ = 0;
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
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      if (step.level < levels() && step.tokens > 0) {
        own[static_cast<size_t>(step.level - 1)].add(options().history, step.tokens, step.accepted);
      }
    }
    latest_ = own;
  }

  void choose(int64_t row, int64_t batch, bool some, int64_t* windows) override {
    std::copy(options().windows.begin(), options().windows.end(), windows);
    if (times().at(1, batch).seconds(0) <= 0) return;  // no times yet
    const Row& own = at_row(rows_, row);
    double per_token = 0;  // seconds of a token from below
    for (int32_t level = count(); level >= 1; --level) {
      const size_t i = static_cast<size_t>(level - 1);
      const WidthTimes& verify = times().at(level, batch);
      const WidthTimes& draft = times().at(level + 1, batch);
      const double a = own[i].acceptance(options().history, options().max_acceptance, kUnknown);
      const bool lowest = level == count();
      double best = 0, reach = 1, tokens = 1;  // of a window of 0
      int64_t chosen = -1;
      for (int64_t g = 0; g <= options().max_windows[i]; ++g) {
        if (g > 0) tokens += reach *= a;
        if (g == 0 && some && level == 1) continue;
        const double below =
            lowest ? (g > 0 ? draft.seconds(g) : 0) : static_cast<double>(g) * per_token;
        const double seconds = (below + verify.seconds(g)) / tokens;
        if (chosen < 0 || seconds < best) {
          best = seconds;
          chosen = g;
        }
      }
      windows[i] = chosen;
      per_token = best;
    }
  }

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
