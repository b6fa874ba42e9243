#include "policy/adaptive.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace polyspec {
namespace policy {
namespace {

const char* const kCounts = "0 to 2147483647";

[[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string(name) + ": expected " + expected + ", given " + got);
}

// Seconds in which levels read tokens that they had missed.
double catch_up(const RoundReport& report) {
  double seconds = 0;
  for (int64_t i = 0; i < report.num_steps; ++i) {
    if (catches_up(report.steps[i])) seconds += report.steps[i].seconds;
  }
  return seconds;
}

void check_row(int64_t row) {
  if (row >= 0 && row < kPolicyRows) return;
  refuse("row", "0 to " + std::to_string(kPolicyRows - 1), std::to_string(row));
}

}  // namespace

AdaptivePolicy::AdaptivePolicy(PolicyOptions options)
    : options_(std::move(options)),
      times_(static_cast<int32_t>(options_.windows.size()) + 1),
      latest_(fresh_guard()) {}

void AdaptivePolicy::reset() {
  times_ = StepTimes(levels());
  rows_.clear();
  latest_ = fresh_guard();
  together_ = Unit{};
  turn_ = Turn{};
  told_ = settled_ = false;
  forget();
}

Guard AdaptivePolicy::fresh_guard() const {
  return Guard({options_.guard_loss, options_.guard_hold, options_.guard_share});
}

void AdaptivePolicy::plain(int64_t* windows) const {
  std::fill_n(windows, static_cast<size_t>(count()), 0);
}

void AdaptivePolicy::observe(const RoundReport& report) {
  for (int64_t i = 0; i < report.num_steps; ++i) {
    const StepReport& step = report.steps[i];
    if (step.seconds <= 0 || step.repeated) continue;
    double seconds = step.seconds;
    if (turn_.sample && step.level == 1 && step.width > 0) {
      // One row had draft tokens: as many in each row take as much more each.
      const double alone = times_.at(1, step.batch).measured(0);
      seconds += static_cast<double>(step.batch - 1) * std::max(0.0, seconds - alone);
    }
    times_.observe(step.level, step.batch, step.width, seconds);
  }
  told_ = told_ || report.num_steps > 0;
}

// Writes windows to measure with, where times of this batch are still missing. The cost of passes
// may rule speculation out, and should then be known before wide passes are tried. In a batch one
// row drafts first, so that the levels below do not read every prompt for a trial.
bool AdaptivePolicy::measuring(int64_t batch, int64_t* windows) {
  if (!by_times()) return false;
  if (told_ && times_.at(1, batch).seconds(0) <= 0) return false;  // no measurement
  if (!told_ || !times_.known(1, batch)) {
    settled_ = sampled_ = false;
    plain(windows);
    return true;
  }
  for (int32_t level = 2; level <= levels(); ++level) {
    if (times_.known(level, batch)) return false;
  }
  constexpr int64_t kFew = 2;
  for (const int64_t window : options_.windows) {
    *windows++ = std::clamp<int64_t>(window, 1, kFew);
  }
  turn_.sample = batch > 1 && !sampled_;
  sampled_ = true;
  return true;
}

void AdaptivePolicy::check(const RoundReport& report) const {
  check_row(report.row);
  if (report.batch < 0 || report.batch > kPolicyRows) {
    refuse("batch", "0 to " + std::to_string(kPolicyRows), std::to_string(report.batch));
  }
  if (report.num_tokens < 0 || report.num_tokens > kPolicyCount) {
    refuse("num_tokens", kCounts, std::to_string(report.num_tokens));
  }
  for (int64_t i = 0; i < report.num_steps; ++i) {
    const StepReport& step = report.steps[i];
    if (step.level < 1 || step.level > levels()) {
      refuse("steps", "levels 1 to " + std::to_string(levels()), std::to_string(step.level));
    }
    if (step.accepted < 0 || step.accepted > step.tokens || step.tokens > kPolicyCount ||
        step.batch < 1 || step.batch > kPolicyCount) {
      refuse("steps",
             "0 <= accepted <= tokens and 1 <= batch, at most " + std::to_string(kPolicyCount),
             std::to_string(step.accepted) + ", " + std::to_string(step.tokens) + ", " +
                 std::to_string(step.batch));
    }
  }
}

void AdaptivePolicy::forget_row(int64_t row) {
  check_row(row);
  // The policy's state of the row is reset when its next text begins.
  if (static_cast<size_t>(row) < rows_.size()) rows_[static_cast<size_t>(row)] = Row{};
}

AdaptivePolicy::Over AdaptivePolicy::told_of(const Row& row, const RoundReport& report) const {
  Over over{1, report.num_tokens, row.windows[0] > 0 ? 1 : 0, 0, catch_up(report)};
  for (int64_t i = 0; i < report.num_steps; ++i) {
    const StepReport& step = report.steps[i];
    // Medians, on both sides of the comparison: one slow step does not show the cost of a step.
    if (!catches_up(step) && step.seconds > 0) {
      over.seconds += times_.at(step.level, step.batch).measured(step.width);
    }
  }
  return over;
}

void AdaptivePolicy::account(Unit& unit, const Over& over) {
  const double alone = times_.at(1, unit.batch).measured(0);
  if (options_.guard && over.seconds > 0 && alone > 0) {
    // A plain pass brings each row a token.
    const double tokens = static_cast<double>(over.tokens) / static_cast<double>(over.rows);
    const double loss = over.seconds / alone - tokens;
    const double share = static_cast<double>(over.drafted) / static_cast<double>(over.rows);
    unit.guard.update({over.drafted > 0, loss, over.catch_up / alone, std::llround(tokens), share});
    latest_ = unit.guard;
  }
  ++unit.rounds;
}

// Whether the windows need not be chosen; writes them.
bool AdaptivePolicy::decided(Unit& unit, int64_t* windows) {
  if (!options_.guard) return false;
  // The cost of plain decoding must be known, and measured again now and then.
  constexpr int64_t kSettled = 2;
  const WidthTimes& target = times_.at(1, unit.batch);
  const bool look =
      target.seconds(0) > 0 && unit.rounds >= kSettled && !(settled_ && target.fresh(0));
  if (!look && !unit.guard.plain()) return measuring(unit.batch, windows);
  settled_ = settled_ || unit.rounds >= kSettled;
  plain(windows);
  return true;
}

// The first report of a batch's turn. The outcome of all rows in the last round is known when the
// turn ends: it counts in the next.
void AdaptivePolicy::begin_turn(const RoundReport& report, bool begins) {
  const Over over = turn_.over;
  const bool sample = turn_.sample;
  ++turn_.number;
  turn_.left = report.batch;
  turn_.over = Over{};
  turn_.sample = false;
  if (over.rows > 0) account(together_, over);
  if (sample) {
    const double alone = times_.at(1, report.batch).measured(0), read = catch_up(report);
    unread_ = alone > 0 ? static_cast<double>(report.batch - 1) * read / alone : 0;
  }
  if (begins || together_.windows.empty()) {
    together_ = Unit{latest_, options_.windows, 0, report.batch};
  }
  together_.batch = report.batch;
  if (begins) together_.guard.begin(report.num_tokens);
  if (begins || turn_.rows.empty()) turn_.rows.assign(1, report.row);
  turn_.first.assign(static_cast<size_t>(count()), 0);
  const bool some = options_.guard && together_.guard.trial();
  bool done = decided(together_, turn_.first.data());
  if (done && turn_.first[0] > 0 && !turn_.sample && !some && unread_ > options_.guard_loss) {
    done = false;  // too much to read for a measurement: the times of one row decide
  }
  turn_.free = !done && !by_times();
  if (!done && by_times()) {
    choose({turn_.rows, report.batch, some, together_.windows}, turn_.first.data());
    if (turn_.first[0] == 0 && options_.guard) {
      together_.guard.decline();
      latest_ = together_.guard;
    }
  }
  if (!turn_.free) together_.windows = turn_.first;
  turn_.rows.clear();
}

// The last row of a batch goes on alone.
void AdaptivePolicy::take_over(Row& row) const {
  std::vector<int64_t> windows = std::move(row.windows);
  static_cast<Unit&>(row) = together_;
  row.windows = std::move(windows);
}

void AdaptivePolicy::next(const RoundReport& report, int64_t* windows) {
  check(report);
  const bool shared = report.batch > 1;
  Row& row = at_row(rows_, report.row);
  observe(report);
  const bool begins = report.begins || row.windows.empty();
  Over over;
  if (row.shared && !shared) take_over(row);
  row.shared = shared;
  if (begins) {
    static_cast<Unit&>(row) = {latest_, options_.windows, 0, 1};
    if (!shared) row.guard.begin(report.num_tokens);
    begin(report.row, report);
  } else {
    if (report.num_steps > 0) row.batch = report.steps[report.num_steps - 1].batch;
    over = told_of(row, report);
    learn(report.row, report);
    if (!shared) account(row, over);
  }
  if (shared) {
    if (turn_.left == 0 || row.turn == turn_.number) begin_turn(report, begins);
    row.turn = turn_.number;
    --turn_.left;
    turn_.rows.push_back(report.row);
    turn_.over.rows += over.rows;
    turn_.over.tokens += over.tokens;
    // All rows wait for all steps.
    turn_.over.seconds = std::max(turn_.over.seconds, over.seconds);
    turn_.over.catch_up = std::max(turn_.over.catch_up, over.catch_up);
    turn_.over.drafted += over.drafted;
    if (turn_.sample && turn_.left + 1 < report.batch) {
      plain(windows);
    } else {
      std::copy(turn_.first.begin(), turn_.first.end(), windows);
    }
    if (turn_.free) choose({{report.row}, report.batch, false, row.windows}, windows);
  } else if (!decided(row, windows)) {
    choose({{report.row}, row.batch, options_.guard && row.guard.trial(), row.windows}, windows);
    if (windows[0] == 0 && options_.guard) {
      row.guard.decline();
      latest_ = row.guard;
    }
  }
  row.windows.assign(windows, windows + count());
}

}  // namespace policy

namespace {

using policy::refuse;

template <class T>
void require(bool good, const char* name, const char* expected, T got) {
  if (!good) refuse(name, expected, std::to_string(got));
}

void check(const PolicyOptions& o) {
  require(!o.windows.empty() && o.windows.size() < (1u << 16) - 1, "windows",
          "one for each level but the last", o.windows.size());
  if (o.max_windows.size() != o.windows.size()) {
    refuse("max_windows", std::to_string(o.windows.size()), std::to_string(o.max_windows.size()));
  }
  for (const int64_t w : o.windows) require(w >= 0, "windows", ">= 0", w);
  for (const int64_t w : o.max_windows) {
    require(w >= 1 && w <= 1024, "max_windows", "1 to 1024", w);
  }
  require(o.history >= 1, "history", ">= 1", o.history);
  require(o.max_acceptance > 0 && o.max_acceptance < 1, "max_acceptance", "(0, 1)",
          o.max_acceptance);
  require(o.forgetting > 0 && o.forgetting <= 1, "forgetting", "(0, 1]", o.forgetting);
  require(o.ngram >= 1 && o.ngram <= 8, "ngram", "1 to 8", o.ngram);
  require(o.learning_rate > 0 && o.learning_rate <= 1, "learning_rate", "(0, 1]", o.learning_rate);
  require(o.discount >= 0 && o.discount < 1, "discount", "[0, 1)", o.discount);
  require(o.exploration >= 0 && o.exploration <= 1, "exploration", "[0, 1]", o.exploration);
  require(o.guard_loss > 0, "guard_loss", "> 0", o.guard_loss);
  require(o.guard_share > 0, "guard_share", "> 0", o.guard_share);
  require(o.guard_hold >= 1 && o.guard_hold <= kPolicyCount, "guard_hold", "1 to 2147483647",
          o.guard_hold);
}

}  // namespace

std::unique_ptr<WindowPolicy> make_policy(PolicyOptions options) {
  if (options.max_windows.empty() && !options.windows.empty()) {
    options.max_windows.assign(options.windows.size(), 32);
    options.max_windows.back() = 16;
  }
  check(options);
  if (options.kind != PolicyKind::kFixed) {
    for (size_t i = 0; i < options.windows.size(); ++i) {
      options.windows[i] = std::min(options.windows[i], options.max_windows[i]);
    }
  }
  switch (options.kind) {
    case PolicyKind::kFixed:
      return policy::make_fixed(std::move(options));
    case PolicyKind::kOnline:
      return policy::make_online(std::move(options));
    case PolicyKind::kFsm:
      return policy::make_fsm(std::move(options));
    case PolicyKind::kCachedFsm:
      return policy::make_cached_fsm(std::move(options));
    case PolicyKind::kQLearning:
      return policy::make_q_learning(std::move(options));
    case PolicyKind::kJoint:
      return policy::make_joint(std::move(options));
  }
  refuse("kind", "a PolicyKind", std::to_string(static_cast<int32_t>(options.kind)));
}

}  // namespace polyspec
