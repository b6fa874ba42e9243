// What all policies share: rows, times, the fall-back to plain decoding.
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
  // Its windows in the round that is over.
  const std::vector<int64_t>& windows_of(int64_t row) const {
    return rows_[static_cast<size_t>(row)].windows;
  }

  // A row begins; `row` may have served another request before.
  virtual void begin(int64_t row, const RoundReport& report) = 0;
  // A round of the row is over.
  virtual void learn(int64_t row, const RoundReport& report) = 0;
  // The windows of its next round, within the options' limits. some: at least one token, please.
  virtual void choose(int64_t row, int64_t batch, bool some, int64_t* windows) = 0;
  virtual void forget() = 0;  // all rows
  // Whether `choose` goes by the levels' times. The guard then has them measured before it asks:
  // first of plain decoding, then of a round of few tokens.
  virtual bool by_times() const { return false; }

 private:
  struct Row {
    Guard guard;
    std::vector<int64_t> windows;
    int64_t rounds = 0;
    int64_t batch = 1;
  };
  void check(const RoundReport& report) const;
  void observe(const RoundReport& report);
  void plain(int64_t* windows) const;
  bool measuring(int64_t* windows) const;
  Guard fresh_guard() const;

  PolicyOptions options_;
  StepTimes times_;
  std::vector<Row> rows_;
  Guard latest_;          // of the row that reported last: a new one goes on from there
  bool told_ = false;     // of a round
  bool settled_ = false;  // plain decoding was timed behind the first rounds, which are slower
  bool drafted_ = false;  // the levels below the target have told a time
};

std::unique_ptr<WindowPolicy> make_fixed(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_online(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_fsm(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_cached_fsm(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_q_learning(PolicyOptions options);
std::unique_ptr<WindowPolicy> make_joint(PolicyOptions options);

// Rows of a policy's own, made when first asked for.
template <class T>
T& at_row(std::vector<T>& rows, int64_t row) {
  if (static_cast<size_t>(row) >= rows.size()) rows.resize(static_cast<size_t>(row) + 1);
  return rows[static_cast<size_t>(row)];
}

}  // namespace policy
}  // namespace polyspec
