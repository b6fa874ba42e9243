// The base of all policies: rows, times, the fall-back to plain decoding.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy/guard.hpp"
#include "policy/step_times.hpp"
#include "polyspec/policy.hpp"

namespace polyspec {
namespace policy {

class AdaptivePolicy : public WindowPolicy {
 public:
  explicit AdaptivePolicy(PolicyOptions options);
  void next(const RoundReport& report, int64_t* windows) final;
  void forget_row(int64_t row) final;
  void reset() final;
  int32_t levels() const final { return count() + 1; }

 protected:
  int32_t count() const { return static_cast<int32_t>(options_.windows.size()); }  // n - 1
  const PolicyOptions& options() const { return options_; }
  const StepTimes& times() const { return times_; }
  // A row's windows in the round that is over.
  const std::vector<int64_t>& windows_of(int64_t row) const {
    return rows_[static_cast<size_t>(row)].windows;
  }
  // The subject of a choice: one row, or all that share a batch's steps. A step takes as long as
  // its widest row wants, so a row with fewer tokens than its neighbours gains nothing.
  struct Choice {
    const std::vector<int64_t>& rows;
    int64_t batch;                    // rows of a step, with its times
    bool some;                        // at least one token, please
    const std::vector<int64_t>& now;  // windows in use
  };

  // A row begins; `row` may have served another request before.
  virtual void begin(int64_t row, const RoundReport& report) = 0;
  // A round of the row is over.
  virtual void learn(int64_t row, const RoundReport& report) = 0;
  // The windows of the next round, within the options' limits. Several rows: only `by_times`.
  virtual void choose(const Choice& choice, int64_t* windows) = 0;
  virtual void forget() = 0;  // all rows
  // Whether `choose` goes by the levels' times. The guard then has them measured before it asks:
  // first of plain decoding, then of a round of few tokens.
  virtual bool by_times() const { return false; }

 private:
  // A round that is over: of a row, or of all rows of a batch.
  struct Over {
    int64_t rows = 0;
    int64_t tokens = 0;   // of all rows
    int64_t drafted = 0;  // rows with a window
    double seconds = 0, catch_up = 0;
  };
  // One row, or all that share a batch's steps: decides between plain decoding and windows.
  struct Unit {
    Guard guard;
    std::vector<int64_t> windows;  // of the round that is over; of rows that differ, the first's
    int64_t rounds = 0;
    int64_t batch = 1;
  };
  struct Row : Unit {
    int64_t turn = 0;  // of the batch that reported it last
    bool shared = false;
  };
  // The turn of a batch: its rows are reported one after another, the first decides for all.
  struct Turn {
    int64_t number = 0;
    int64_t left = 0;            // reports to come
    bool free = false;           // rows choose for themselves
    bool sample = false;         // only the first row drafts
    Over over;                   // of the rows reported in this turn
    std::vector<int64_t> rows;   // these
    std::vector<int64_t> first;  // the windows that were decided
  };
  void check(const RoundReport& report) const;
  void observe(const RoundReport& report);
  void plain(int64_t* windows) const;
  bool measuring(int64_t batch, int64_t* windows);
  Guard fresh_guard() const;
  Over told_of(const Row& row, const RoundReport& report) const;
  void account(Unit& unit, const Over& over);
  bool decided(Unit& unit, int64_t* windows);
  void take_over(Row& row) const;
  void begin_turn(const RoundReport& report, bool begins);

  PolicyOptions options_;
  StepTimes times_;
  std::vector<Row> rows_;
  Unit together_;  // the rows of a batch
  Turn turn_;
  Guard latest_;          // of the unit reported last: a new unit goes on from there
  bool told_ = false;     // of a round
  bool settled_ = false;  // plain decoding was timed after the first rounds, which are slower
  bool sampled_ = false;  // one row of a batch of about this size has drafted
  double unread_ = 0;     // passes for the other rows to read their unread tokens
};

std::unique_ptr<WindowPolicy> make_fixed(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_online(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_fsm(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_cached_fsm(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_q_learning(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_joint(PolicyOptions options);

// Whether a step's time passed while its level read tokens that it had missed.
inline bool catches_up(const StepReport& step) { return step.repeated && step.batch == 1; }

// Rows of one policy, created at first use.
template <class T>
T& at_row(std::vector<T>& rows, int64_t row) {
  if (static_cast<size_t>(row) >= rows.size()) rows.resize(static_cast<size_t>(row) + 1);
  return rows[static_cast<size_t>(row)];
}

}  // namespace policy
}  // namespace polyspec
