// The lines of a batch (device_scheduler.hpp) in poisoned memory, and the two operators over them.
// Every call gets outputs full of kPoison; afterwards, what lies around each buffer must be as it
// was.
#pragma once

#include <utility>
#include <vector>

#include "check.hpp"
#include "polyspec/device_scheduler.hpp"

namespace schedule_lines {

using Shape = polyspec::ScheduleShape;

constexpr int64_t kPoison = -0x5a5a5a5a5a5a5a5a;
constexpr int64_t kNowhere = -4321;

// n words with more of them on both sides, which nobody may touch.
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

// A row of what schedule_next says.
struct Planned {
  int64_t part, count, first, length, position, round;
  std::vector<int64_t> fed;  // [width]

  bool operator==(const Planned& other) const {
    return part == other.part && count == other.count && first == other.first &&
           length == other.length && position == other.position && round == other.round &&
           fed == other.fed;
  }
};

// What came of a step. The status is [b, width] for a draft and [b] for a verification.
struct Came {
  int64_t width = 1;
  std::vector<int64_t> tokens;    // [b, width]
  std::vector<int64_t> accepted;  // [b], empty for a draft
  std::vector<int32_t> status;
  std::vector<int64_t> eos;  // [b, num_eos]
};

// One entry of a row's log.
struct Entry {
  int64_t count, accepted, emitted, ended, status;

  bool operator==(const Entry& other) const {
    return count == other.count && accepted == other.accepted && emitted == other.emitted &&
           ended == other.ended && status == other.status;
  }
};
constexpr Entry kIdle{-1, 0, 0, 0, 0};

class Lines {
 public:
  Lines(const std::vector<int64_t>& windows, const std::vector<int64_t>& rounds, int64_t batch,
        int64_t tail, int64_t steps)
      : params_(with(windows, rounds, batch, tail, steps)),
        state_(batch * params_.shape.words()),
        plan_(polyspec::kPlanRows * batch) {
    params_.state = state_.data();
  }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  const polyspec::ScheduleParams& params() const { return params_; }
  int64_t& header(int64_t row, Shape::Header word) { return state_[line(row) + word]; }
  int64_t& level(int64_t row, int32_t level, Shape::Level word) {
    return state_[line(row) + params_.shape.level_at(level) + word];
  }
  int64_t& tail(int64_t row, int64_t i) { return state_[line(row) + params_.shape.tail_at() + i]; }
  Entry log(int64_t row, int64_t step) {
    const int64_t at = line(row) + params_.shape.log_at() + step * Shape::kPerStep;
    return {state_[at + Shape::kCount], state_[at + Shape::kAccepted], state_[at + Shape::kEmitted],
            state_[at + Shape::kEnded], state_[at + Shape::kStatus]};
  }

  // Begins a row: `cached` by level, nothing pending, no step entered.
  void begin(int64_t row, int64_t origin, int64_t room, const std::vector<int64_t>& tokens,
             const std::vector<int64_t>& cached, const std::vector<int64_t>& rounds) {
    header(row, Shape::kTotal) = static_cast<int64_t>(tokens.size());
    header(row, Shape::kOrigin) = origin;
    header(row, Shape::kRoom) = room;
    header(row, Shape::kStopped) = header(row, Shape::kStep) = 0;
    for (int32_t i = 1; i <= params_.shape.levels; ++i) {
      level(row, i, Shape::kCached) = cached[static_cast<size_t>(i - 1)];
      level(row, i, Shape::kRound) = rounds[static_cast<size_t>(i - 1)];
      level(row, i, Shape::kPending) = level(row, i, Shape::kBlocks) = 0;
      level(row, i, Shape::kClosed) = 0;
    }
    for (size_t i = 0; i < tokens.size(); ++i) tail(row, static_cast<int64_t>(i)) = tokens[i];
  }

  // schedule_next for `level`. It must not change the lines. The plan is kept for report().
  std::vector<Planned> next(int32_t level, int64_t width) {
    const std::vector<int64_t> before = state_.copy();
    Guarded fed(params_.batch * width);
    plan_ = Guarded(polyspec::kPlanRows * params_.batch);
    polyspec::ScheduleNextParams p;
    p.in = params_;
    p.in.level = level;
    p.width = width;
    p.fed = fed.data();
    p.plan = plan_.data();
    const polyspec::Result result = polyspec::schedule_next(p);
    CHECK_EQ(std::string(), result.message);
    check_margins();
    fed.check_margins();
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
                      {}};
      for (int64_t i = 0; i < width; ++i) planned.fed.push_back(fed[row * width + i]);
      rows.push_back(planned);
    }
    return rows;
  }

  // schedule_report of `level` with the latest plan. Returns `place`, [b, width].
  std::vector<int64_t> report(int32_t level, const Came& came) {
    Guarded place(params_.batch * came.width);
    polyspec::ScheduleReportParams p;
    p.in = params_;
    p.in.level = level;
    p.plan = plan_.data();
    p.width = came.width;
    p.tokens = came.tokens.data();
    p.accepted = came.accepted.empty() ? nullptr : came.accepted.data();
    p.status = came.status.data();
    p.num_eos = static_cast<int64_t>(came.eos.size()) / params_.batch;
    p.eos = came.eos.data();
    p.place = place.data();
    p.nowhere = kNowhere;
    Guarded lengths(params_.shape.levels * params_.batch);
    if (params_.batch % 2 == 1) p.lengths = lengths.data();
    const std::vector<int64_t> plan = plan_.copy();
    const polyspec::Result result = polyspec::schedule_report(p);
    CHECK_EQ(std::string(), result.message);
    check_margins();
    place.check_margins();
    if (p.lengths != nullptr) check_lengths(lengths);
    CHECK(plan == plan_.copy());
    return place.copy();
  }

  std::vector<int64_t> copy() const { return state_.copy(); }

 private:
  static polyspec::ScheduleParams with(const std::vector<int64_t>& windows,
                                       const std::vector<int64_t>& rounds, int64_t batch,
                                       int64_t tail, int64_t steps) {
    polyspec::ScheduleParams params;
    params.shape.levels = static_cast<int32_t>(windows.size()) + 1;
    params.shape.tail = tail;
    params.shape.steps = steps;
    for (size_t i = 0; i < windows.size(); ++i) {
      params.windows[i] = windows[i];
      params.rounds[i] = rounds[i];
    }
    params.batch = batch;
    return params;
  }
  int64_t line(int64_t row) const { return row * params_.shape.words(); }
  void check_margins() const {
    state_.check_margins();
    plan_.check_margins();
  }

  // What the caches may keep is what the lines say, from the text's beginning.
  void check_lengths(const Guarded& lengths) const {
    lengths.check_margins();
    const std::vector<int64_t> found = lengths.copy(), words = state_.copy();
    for (int32_t level = 1; level <= params_.shape.levels; ++level) {
      for (int64_t row = 0; row < params_.batch; ++row) {
        const int64_t at = line(row) + params_.shape.level_at(level);
        const int64_t wanted = words[at + polyspec::ScheduleShape::kCached] +
                               words[line(row) + polyspec::ScheduleShape::kOrigin];
        CHECK_EQ(wanted, found[(level - 1) * params_.batch + row]);
      }
    }
  }

  polyspec::ScheduleParams params_;
  Guarded state_, plan_;
};

}  // namespace schedule_lines
