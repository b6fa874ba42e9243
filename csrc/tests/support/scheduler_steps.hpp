// A request of one chain through both entry points of the schedule, the Scheduler and the operators
// over a state row, and their expected next step.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "polyspec/scheduler.hpp"
#include "support/check.hpp"
#include "support/state_rows.hpp"

namespace scheduler_steps {

using polyspec::Step;

// Scheduler's functions. Every step of both must be the same, and both get its outcome. The row's
// tokens are arbitrary: only the end of the text matters.
class Scheduler {
 public:
  explicit Scheduler(std::vector<int64_t> windows, std::vector<int64_t> rounds = {})
      : scheduler_(std::move(windows), std::move(rounds)) {}

  void start(int64_t max_new_tokens) {
    scheduler_.start(max_new_tokens);
    const size_t levels = static_cast<size_t>(scheduler_.levels());
    rows_ = std::make_unique<state_rows::StateRows>(scheduler_.levels(), 1, 1 + max_new_tokens, 1);
    rows_->begin(0, max_new_tokens, {kToken}, std::vector<int64_t>(levels, 0),
                 std::vector<int64_t>(levels, 0));
    rows_->set_windows(0, scheduler_.windows(), scheduler_.rounds());
    rows_->header(0, state_rows::Shape::kTailWindow) = scheduler_.tail();
  }
  Step next() const {
    const Step step = scheduler_.next();
    if (rows_ != nullptr) {
      const auto [level, count] = rows_->due()[0];
      CHECK_EQ(int64_t{step.level}, level);
      CHECK_EQ(step.count, count);
    }
    return step;
  }
  void report(int32_t level, int64_t emitted, bool eos = false) {
    const Step step = scheduler_.next();
    scheduler_.report(level, emitted, eos);  // an invalid report changes no row
    state_rows::Came came;
    came.width = emitted + 1;
    came.tokens.assign(static_cast<size_t>(came.width), kToken);
    if (eos) came.tokens[static_cast<size_t>(emitted - 1)] = kEos;
    const bool draft = level == scheduler_.levels();
    came.counts = {draft ? emitted : emitted - 1};
    came.status.assign(draft ? static_cast<size_t>(came.width) : 1, 0);
    came.eos = {kEos};
    rows_->header(0, state_rows::Shape::kStep) = 0;
    const int64_t unread = rows_->header(0, state_rows::Shape::kTotal) -
                           rows_->level(0, level, state_rows::Shape::kCached);
    const state_rows::Planned plan = rows_->next(level, unread)[0];
    CHECK_EQ(int64_t{1}, plan.part);
    CHECK_EQ(step.of_tail, plan.of_tail);
    rows_->report(level, came);
    CHECK_EQ(step.of_tail, rows_->log(0, 0).of_tail);
    CHECK_EQ(int64_t{0}, rows_->header(0, state_rows::Shape::kStopped));
  }
  void set_tail(int64_t tail) {
    scheduler_.set_tail(tail);
    if (rows_ != nullptr) rows_->header(0, state_rows::Shape::kTailWindow) = tail;
  }
  void set_windows(std::vector<int64_t> windows) {
    scheduler_.set_windows(std::move(windows));
    rows_->set_windows(0, scheduler_.windows(), scheduler_.rounds());
  }
  int64_t pending(int32_t level) const {
    const int64_t count = scheduler_.pending(level);
    CHECK_EQ(count, rows_->level(0, level, state_rows::Shape::kPending));
    return count;
  }
  bool done() const {
    const bool over = scheduler_.done();
    if (rows_ != nullptr) CHECK_EQ(over, rows_->header(0, state_rows::Shape::kRoom) == 0);
    return over;
  }
  int32_t levels() const { return scheduler_.levels(); }
  const std::vector<int64_t>& windows() const { return scheduler_.windows(); }
  const std::vector<int64_t>& rounds() const { return scheduler_.rounds(); }
  int64_t committed() const { return scheduler_.committed(); }

 private:
  static constexpr int64_t kToken = 1, kEos = 9;

  polyspec::Scheduler scheduler_;
  std::unique_ptr<state_rows::StateRows> rows_;  // once a request has begun
};

inline void expect(const Scheduler& scheduler, Step::Kind kind, int32_t level, int64_t count) {
  const Step step = scheduler.next();
  CHECK_EQ(static_cast<int32_t>(kind), static_cast<int32_t>(step.kind));
  CHECK_EQ(level, step.level);
  CHECK_EQ(count, step.count);
}
inline void expect_draft(const Scheduler& s, int32_t level, int64_t count) {
  expect(s, Step::Kind::kDraft, level, count);
}
inline void expect_verify(const Scheduler& s, int32_t level, int64_t count) {
  expect(s, Step::Kind::kVerify, level, count);
}
inline void expect_done(const Scheduler& s) {
  expect(s, Step::Kind::kDone, 0, 0);
  CHECK(s.done());
}

}  // namespace scheduler_steps
