// The state rows of a batch (round_state.hpp) in poisoned memory, and the two operators over them.
// Every call gets outputs full of kPoison; afterwards, memory around buffers must be unchanged.
#pragma once

#include <utility>
#include <vector>

#include "polyspec/round_state.hpp"
#include "support/check.hpp"

namespace state_rows {

using Shape = polyspec::RoundShape;

constexpr int64_t kPoison = -0x5a5a5a5a5a5a5a5a;
constexpr int64_t kPadding = -4321;

// n words between guard words, which no call may touch.
class Guarded {
 public:
  explicit Guarded(int64_t n) : size_(n), words_(static_cast<size_t>(n + 2 * kMargin), kPoison) {}
  int64_t* data() { return words_.data() + kMargin; }
  int64_t& operator[](int64_t i) {
    CHECK(i >= 0 && i < size_);
    return data()[i];
  }
  std::vector<int64_t> copy() const {
    return {words_.begin() + kMargin, words_.begin() + kMargin + size_};
  }
  void check_margins() const {
    for (int64_t i = 0; i < kMargin; ++i) {
      CHECK_EQ(kPoison, words_[static_cast<size_t>(i)]);
      CHECK_EQ(kPoison, words_[words_.size() - 1 - static_cast<size_t>(i)]);
    }
  }

 private:
  static constexpr int64_t kMargin = 24;
  int64_t size_;
  std::vector<int64_t> words_;
};

// A row of schedule_next's outputs.
struct Planned {
  int64_t part, count, first, length, position, round;
  std::vector<int64_t> input_ids;  // [width]
  int64_t of_tail = 0;

  bool operator==(const Planned& other) const {
    return part == other.part && count == other.count && first == other.first &&
           length == other.length && position == other.position && round == other.round &&
           input_ids == other.input_ids && of_tail == other.of_tail;
  }
};

// The outcome of a step. The status is [b, width] for a draft and [b] for a verification.
struct Came {
  int64_t width = 1;
  std::vector<int64_t> tokens;  // [b, width]
  std::vector<int64_t> counts;  // [b] accepted, or proposed by a draft; empty: all
  std::vector<int32_t> status;
  std::vector<int64_t> eos;  // [b, num_eos]
};

// One entry of a row's log.
struct Entry {
  int64_t count, position, accepted, emitted, ended, status;
  int64_t of_tail = 0;

  bool operator==(const Entry& other) const {
    return count == other.count && position == other.position && accepted == other.accepted &&
           emitted == other.emitted && ended == other.ended && status == other.status &&
           of_tail == other.of_tail;
  }
};
constexpr Entry kIdle{-1, 0, 0, 0, 0, 0};

class StateRows {
 public:
  StateRows(int32_t levels, int64_t batch, int64_t capacity, int64_t steps)
      : params_(with(levels, batch, capacity, steps)),
        state_(batch * params_.shape.words()),
        plan_(polyspec::kPlanRows * batch) {
    params_.state = state_.data();
  }
  StateRows(const StateRows&) = delete;
  StateRows& operator=(const StateRows&) = delete;

  const polyspec::RoundParams& params() const { return params_; }
  int64_t& header(int64_t row, Shape::Header word) { return state_[line(row) + word]; }
  int64_t& level(int64_t row, int32_t level, Shape::Level word) {
    return state_[line(row) + params_.shape.level_at(level) + word];
  }
  int64_t& text(int64_t row, int64_t i) { return state_[line(row) + params_.shape.text_at() + i]; }
  int64_t& word(int64_t row, int64_t i) { return state_[line(row) + i]; }
  // Of the latest plan.
  int64_t& planned(int64_t row, polyspec::SchedulePlan what) {
    return plan_[what * params_.batch + row];
  }
  Entry log(int64_t row, int64_t step) {
    const int64_t at = line(row) + params_.shape.log_at() + step * Shape::kPerStep;
    return {state_[at + Shape::kCount],    state_[at + Shape::kPosition],
            state_[at + Shape::kAccepted], state_[at + Shape::kEmitted],
            state_[at + Shape::kEnded],    state_[at + Shape::kStatus],
            state_[at + Shape::kOfTail]};
  }

  // Begins a row: `cached` and `rounds` by level, nothing pending, no step entered.
  void begin(int64_t row, int64_t room, const std::vector<int64_t>& tokens,
             const std::vector<int64_t>& cached, const std::vector<int64_t>& rounds) {
    header(row, Shape::kTotal) = static_cast<int64_t>(tokens.size());
    header(row, Shape::kRoom) = room;
    header(row, Shape::kStopped) = header(row, Shape::kStep) = 0;
    header(row, Shape::kTailWindow) = header(row, Shape::kTailPending) = 0;
    for (int32_t i = 1; i <= params_.shape.levels; ++i) {
      level(row, i, Shape::kCached) = cached[static_cast<size_t>(i - 1)];
      level(row, i, Shape::kRound) = rounds[static_cast<size_t>(i - 1)];
      level(row, i, Shape::kPending) = level(row, i, Shape::kBlocks) = 0;
      level(row, i, Shape::kClosed) = 0;
    }
    for (size_t i = 0; i < tokens.size(); ++i) text(row, static_cast<int64_t>(i)) = tokens[i];
  }
  void set_windows(int64_t row, const std::vector<int64_t>& windows,
                   const std::vector<int64_t>& bounds) {
    for (size_t i = 0; i < windows.size(); ++i) {
      level(row, static_cast<int32_t>(i) + 1, Shape::kWindow) = windows[i];
      level(row, static_cast<int32_t>(i) + 1, Shape::kBound) = bounds[i];
    }
  }

  // schedule_due, by row: level and tokens.
  std::vector<std::pair<int64_t, int64_t>> due() {
    const std::vector<int64_t> before = state_.copy();
    Guarded found(2 * params_.batch);
    polyspec::ScheduleDueParams p;
    p.in = params_;
    p.due = found.data();
    const polyspec::Result result = polyspec::schedule_due(p);
    CHECK_EQ(std::string(), result.message);
    found.check_margins();
    CHECK(before == state_.copy());
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t row = 0; row < params_.batch; ++row)
      rows.emplace_back(found[row], found[params_.batch + row]);
    return rows;
  }

  // schedule_next for `level`. It must not change the rows. The plan is kept for report().
  std::vector<Planned> next(int32_t level, int64_t width) {
    const std::vector<int64_t> before = state_.copy();
    Guarded input_ids(params_.batch * width), pending(params_.batch * width);
    plan_ = Guarded(polyspec::kPlanRows * params_.batch);
    polyspec::ScheduleNextParams p;
    p.in = params_;
    p.level = level;
    p.width = width;
    p.input_ids = input_ids.data();
    p.plan = plan_.data();
    p.most = width;
    p.pending = pending.data();
    const polyspec::Result result = polyspec::schedule_next(p);
    CHECK_EQ(std::string(), result.message);
    check_margins();
    input_ids.check_margins();
    pending.check_margins();
    CHECK(before == state_.copy());
    std::vector<Planned> rows;
    for (int64_t row = 0; row < params_.batch; ++row) {
      const auto at = [&](int64_t what) { return plan_[what * params_.batch + row]; };
      Planned planned{at(polyspec::kPlanPart),
                      at(polyspec::kPlanCounts),
                      at(polyspec::kPlanFirst),
                      at(polyspec::kPlanLengths),
                      at(polyspec::kPlanPositions),
                      at(polyspec::kPlanRounds),
                      {},
                      at(polyspec::kPlanOfTail)};
      for (int64_t i = 0; i < width; ++i) planned.input_ids.push_back(input_ids[row * width + i]);
      const int64_t verified = level < params_.shape.levels ? planned.length : 0;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t token = i < verified ? planned.input_ids.at(planned.first + 1 + i) : 0;
        CHECK_EQ(token, pending[row * width + i]);
      }
      rows.push_back(planned);
    }
    return rows;
  }

  // schedule_report of `level` with the latest plan. Returns [b, width], the index of each token
  // among the tokens pending for the level above, and kPadding for others.
  std::vector<int64_t> report(int32_t level, const Came& came) {
    Guarded appended(2 * params_.batch);
    polyspec::ScheduleReportParams p;
    p.in = params_;
    p.level = level;
    p.plan = plan_.data();
    p.width = came.width;
    p.tokens = came.tokens.data();
    p.counts = came.counts.empty() ? nullptr : came.counts.data();
    p.status = came.status.data();
    p.num_eos = static_cast<int64_t>(came.eos.size()) / params_.batch;
    p.eos = came.eos.data();
    p.appended = appended.data();
    Guarded kept(params_.shape.levels * params_.batch);
    if (params_.batch % 2 == 1) p.kept = kept.data();
    const std::vector<int64_t> plan = plan_.copy();
    const polyspec::Result result = polyspec::schedule_report(p);
    CHECK_EQ(std::string(), result.message);
    check_margins();
    appended.check_margins();
    if (p.kept != nullptr) check_kept(kept);
    CHECK(plan == plan_.copy());
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < params_.batch * came.width; ++i) {
      const int64_t row = i / came.width, token = i % came.width;
      const bool pends = token < appended[params_.batch + row];
      slots.push_back(pends ? appended[row] + token : kPadding);
    }
    return slots;
  }

  std::vector<int64_t> copy() const { return state_.copy(); }

 private:
  static polyspec::RoundParams with(int32_t levels, int64_t batch, int64_t capacity,
                                    int64_t steps) {
    polyspec::RoundParams params;
    params.shape.levels = levels;
    params.shape.capacity = capacity;
    params.shape.steps = steps;
    params.batch = batch;
    return params;
  }
  int64_t line(int64_t row) const { return row * params_.shape.words(); }
  void check_margins() const {
    state_.check_margins();
    plan_.check_margins();
  }

  // The outputs for the caches must agree with the rows.
  void check_kept(const Guarded& kept) const {
    kept.check_margins();
    const std::vector<int64_t> found = kept.copy(), words = state_.copy();
    for (int32_t level = 1; level <= params_.shape.levels; ++level) {
      for (int64_t row = 0; row < params_.batch; ++row) {
        const int64_t at = line(row) + params_.shape.level_at(level);
        CHECK_EQ(words[at + Shape::kCached], found[(level - 1) * params_.batch + row]);
      }
    }
  }

  polyspec::RoundParams params_;
  Guarded state_, plan_;
};

}  // namespace state_rows
