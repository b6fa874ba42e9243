// The fall-back to plain decoding of one row (PolicyOptions::guard).
#pragma once

#include <algorithm>
#include <cstdint>

namespace polyspec {
namespace policy {

class Guard {
 public:
  Guard() = default;
  Guard(double loss, int64_t hold) : most_(loss), first_(hold), hold_(hold) {}

  // A round is over. speculated: it had a window. loss: what it took beyond the plain passes that
  // its tokens would have taken, in plain passes; below 0 is a gain.
  void update(bool speculated, double loss, int64_t tokens) {
    if (state_ == State::kPlain) {
      left_ -= tokens;
      if (left_ <= 0) begin_trial();
    } else if (speculated) {
      loss_ += loss;
      if (state_ == State::kSpeculate) {
        loss_ = std::max(-kGains * most_, loss_);
        if (loss_ > most_) rest(hold_);
      } else if (loss_ > most_ || --trials_ == 0) {
        if (loss_ < 0) {
          state_ = State::kSpeculate;
          loss_ = 0;
          hold_ = first_;
        } else {
          rest(std::min(2 * hold_, kLongest * first_));
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
  double most_ = 0, loss_ = 0;
  int64_t first_ = 0, hold_ = 0, left_ = 0;
  int32_t trials_ = 0;
};

}  // namespace policy
}  // namespace polyspec
