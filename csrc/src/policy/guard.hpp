// The fall-back to plain decoding of one row (PolicyOptions::guard). Its unit is the plain pass of
// the target: the time of speculation beyond the passes that plain decoding would have needed for
// the same tokens is its loss.
#pragma once

#include <algorithm>
#include <cstdint>

namespace polyspec {
namespace policy {

class Guard {
 public:
  struct Limits {
    double loss = 0;   // that ends speculation
    int64_t hold = 0;  // tokens before the first trial
    double share = 0;  // of plain decoding that trials may take
  };
  // A round that is over.
  struct Round {
    bool speculated = false;  // it had a window
    double loss = 0;          // below 0 is a gain
    double catch_up = 0;      // the time of levels to read unread tokens
    int64_t tokens = 0;       // committed
    double share = 1;         // of the rows that drafted and read
  };

  Guard() = default;
  explicit Guard(const Limits& limits) : limits_(limits), hold_(limits.hold) {}

  // A text begins, with a prompt of `tokens`.
  void begin(int64_t tokens) {
    missed_ = tokens;
    // Texts that end before their drafts pay for reading the prompt.
    if (state_ == State::kSpeculate && debt_ > limits_.loss) rest(hold_);
  }

  void update(const Round& round) {
    const bool speculated = round.speculated && state_ != State::kPlain;
    const double missed = static_cast<double>(std::max<int64_t>(missed_, 1));
    if (round.speculated && round.catch_up > 0) reading_ = round.catch_up / (round.share * missed);
    missed_ = round.speculated && round.share == 1 ? 0 : missed_ + round.tokens;
    if (state_ == State::kPlain && round.speculated) {
      // In a batch, which reports a round after the decision.
      debt_ += std::min(round.loss, limits_.loss) + round.catch_up;
    } else if (state_ == State::kPlain) {
      left_ -= round.tokens;
      debt_ -= limits_.share * static_cast<double>(round.tokens);
      const double reading = reading_ * static_cast<double>(missed_);
      if (left_ <= 0 && debt_ + trial_ + reading <= 0) begin_trial();
    } else if (speculated) {
      loss_ += round.loss;
      debt_ += std::min(round.loss, limits_.loss) + round.catch_up;
      if (state_ == State::kSpeculate) {
        loss_ = std::max(-kGains * limits_.loss, loss_);
        if (loss_ > limits_.loss) rest(hold_);
      } else if (loss_ > limits_.loss || --trials_ == 0) {
        if (loss_ < 0) {
          state_ = State::kSpeculate;
          loss_ = trial_ = 0;
          hold_ = limits_.hold;
        } else {
          trial_ = std::min(loss_, limits_.loss);
          rest(std::min(2 * hold_, kLongest * limits_.hold));
        }
      }
    }
  }

  // The policy itself would rather decode plainly.
  void decline() {
    if (state_ == State::kSpeculate) rest(hold_);
  }

  bool plain() const { return state_ == State::kPlain; }
  bool trial() const { return state_ == State::kTrial; }

 private:
  enum class State { kSpeculate, kPlain, kTrial };
  static constexpr double kGains = 2;
  static constexpr int64_t kLongest = 32;
  static constexpr int32_t kTrials = 3;

  void rest(int64_t tokens) {
    // Gains of the past state pay for its end, and for nothing after it.
    debt_ = std::max(debt_, 0.0);
    state_ = State::kPlain;
    left_ = hold_ = tokens;
    loss_ = 0;
  }
  void begin_trial() {
    state_ = State::kTrial;
    trials_ = kTrials;
    loss_ = 0;
  }

  State state_ = State::kSpeculate;
  Limits limits_;
  double loss_ = 0;     // of this time of speculation, or trial; see kGains
  double debt_ = 0;     // of trials and speculation, less the plain decoding's allowance
  double trial_ = 0;    // loss of the last trial, if it lost
  double reading_ = 0;  // passes that a missed token took
  int64_t missed_ = 0;  // tokens that the levels below have not read
  int64_t hold_ = 0, left_ = 0;
  int32_t trials_ = 0;
};

}  // namespace policy
}  // namespace polyspec
