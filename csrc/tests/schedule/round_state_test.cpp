// schedule_next and schedule_report over the fixed order of bounded rounds, and step by step with
// windows that move, against one Scheduler per row and the state of a driver: the text, and how
// much of it each cache holds.
#include <algorithm>
#include <memory>

#include "polyspec/scheduler.hpp"
#include "support/random_case.hpp"
#include "support/state_rows.hpp"

namespace {

using cases::Random;
using polyspec::Scheduler;
using polyspec::Step;
using state_rows::Came;
using state_rows::Entry;
using state_rows::kIdle;
using state_rows::kPadding;
using state_rows::Planned;
using state_rows::Shape;
using state_rows::StateRows;

constexpr int64_t kVocab = 7, kNumEos = 2;

// How often the random requests reached the tested cases.
struct Seen {
  int64_t target_rounds = 0, drafts = 0, verifications = 0, idle = 0, too_wide = 0;
  int64_t wandered = 0, short_drafts = 0, ended = 0, notes = 0, failed = 0, tails = 0;
  int64_t late_tails = 0;
} seen;

// One row, by absolute positions. Level i is at index i - 1.
struct Row {
  Row(Random& random, const std::vector<int64_t>& windows, const std::vector<int64_t>& rounds)
      : scheduler(windows, rounds), windows(windows), rounds(rounds), room(random.below(40)) {
    scheduler.start(room);
    const int64_t prompt = 1 + random.below(6);
    for (int64_t i = 0; i < prompt; ++i) text.push_back(random.below(kVocab));
    for (size_t i = 0; i <= windows.size(); ++i) {
      cached.push_back(random.below(prompt));
      draw_rounds.push_back(random.below(100));
      pending.push_back(0);
      blocks.push_back(0);
      closed.push_back(0);
    }
    for (int64_t i = 0; i < kNumEos; ++i)
      eos.push_back(random.chance(0.4) ? random.below(kVocab) : -1);
  }
  bool ends(int64_t token) const { return std::count(eos.begin(), eos.end(), token) > 0; }
  int64_t size() const { return static_cast<int64_t>(text.size()); }

  Scheduler scheduler;
  std::vector<int64_t> windows, rounds;
  int64_t room, tail = 0;  // pending for the target
  std::vector<int64_t> text, cached, draw_rounds, pending, blocks, closed, eos;
  std::vector<int64_t> lags;  // unread where the round of the target began
  std::vector<Entry> log;     // of this round of the target
  bool stopped = false;
};

// A batch on its way through the rounds of the target.
class Batch {
 public:
  explicit Batch(uint64_t seed) : random_(seed) {
    n_ = 2 + static_cast<int32_t>(random_.below(4));
    for (int32_t i = 1; i < n_; ++i) {
      windows_.push_back(random_.chance(0.1) ? INT64_MAX : random_.below(7));
      rounds_.push_back(i == n_ - 1 ? 0 : 1 + random_.below(3));
    }
    const int64_t rows = 1 + random_.below(5);
    for (int64_t b = 0; b < rows; ++b) rows_.emplace_back(random_, windows_, rounds_);
    int64_t capacity = 1;
    for (const Row& row : rows_) capacity = std::max(capacity, row.size() + row.room);
    state_ = std::make_unique<StateRows>(n_, rows, capacity + random_.below(3),
                                         steps_of(1) + 2 + random_.below(3));
    for (int64_t b = 0; b < rows; ++b) {
      const Row& row = rows_[b];
      state_->begin(b, row.room, row.text, row.cached, row.draw_rounds);
      state_->set_windows(b, row.windows, row.rounds);
      if (n_ == 2 || random_.chance(0.4)) continue;
      rows_[b].scheduler.set_tail(state_->header(b, Shape::kTailWindow) = random_.below(6));
    }
  }

  void play() {
    const auto over = [](const Row& row) { return row.stopped || row.scheduler.done(); };
    moving_ = random_.chance(0.3);
    do {
      moving_ ? wander() : round();
    } while (!std::all_of(rows_.begin(), rows_.end(), over));
    if (!moving_) round();  // with nothing left to do for anybody
    for (const auto& [level, count] : state_->due()) CHECK(level == 0 && count == 0);
  }

 private:
  int64_t batch() const { return static_cast<int64_t>(rows_.size()); }

  // One step, as the rows themselves say, and then perhaps other windows.
  void wander() {
    ++seen.wandered;
    const std::vector<std::pair<int64_t, int64_t>> due = state_->due();
    int64_t deepest = 0;
    for (int64_t b = 0; b < batch(); ++b) {
      const Row& row = rows_[b];
      const Step step = row.scheduler.next();
      CHECK_EQ(row.stopped ? 0 : int64_t{step.level}, due[b].first);
      CHECK_EQ(row.stopped ? 0 : step.count, due[b].second);
      deepest = std::max(deepest, due[b].first);
    }
    clear_logs();
    if (deepest > 0) step(static_cast<int32_t>(deepest));
    for (int64_t b = 0; b < batch(); ++b) {
      Row& row = rows_[b];
      if (!random_.chance(0.2)) continue;
      for (int64_t& window : row.windows)
        window = random_.chance(0.1) ? INT64_MAX : random_.below(7);
      row.scheduler.set_windows(row.windows);
      state_->set_windows(b, row.windows, row.rounds);
    }
  }

  void clear_logs() {
    for (int64_t b = 0; b < batch(); ++b) {
      rows_[b].log.clear();
      state_->header(b, Shape::kStep) = 0;
    }
  }

  void round() {
    ++seen.target_rounds;
    clear_logs();
    const int64_t steps = steps_of(1) + 1 + (n_ > 2);
    std::vector<int64_t> sizes;
    for (Row& row : rows_) {
      sizes.push_back(row.scheduler.committed());
      row.lags.clear();
      for (const int64_t cached : row.cached) row.lags.push_back(row.size() - cached);
    }
    gather(1);
    if (n_ > 2) step(n_);
    step(1);
    for (int64_t b = 0; b < batch(); ++b) {
      Row& row = rows_[b];
      CHECK_EQ(steps, static_cast<int64_t>(row.log.size()));
      if (row.stopped) continue;
      // The program is long enough: the target has verified, unless there was nothing to do.
      CHECK_EQ(row.log.back().count >= 0, row.scheduler.committed() > sizes[b]);
      CHECK(row.scheduler.committed() > sizes[b] || row.scheduler.done());
      for (int32_t i = 1; i < n_; ++i) CHECK_EQ(int64_t{0}, row.scheduler.pending(i));
    }
  }

  int64_t steps_of(int32_t level) const {
    if (windows_[level - 1] == 0) return 0;
    return level == n_ - 1 ? 1 : rounds_[level - 1] * (steps_of(level + 1) + 1);
  }

  void gather(int32_t level) {
    if (windows_[level - 1] == 0) return;
    if (level == n_ - 1) return step(n_);
    for (int64_t i = 0; i < rounds_[level - 1]; ++i) {
      gather(level + 1);
      step(level + 1);
    }
  }

  // The row's part in a step of `level` by its Scheduler, if any.
  bool takes_part(const Row& row, int32_t level, int64_t* count) const {
    const Step step = row.scheduler.next();
    *count = step.count;
    const Step::Kind kind = level == n_ ? Step::Kind::kDraft : Step::Kind::kVerify;
    return !row.stopped && step.kind == kind && step.level == level;
  }

  Planned expected_plan(const Row& row, int32_t level, int64_t width) const {
    const size_t own = static_cast<size_t>(level - 1);
    Planned plan{0, 0, 0, 0, row.size(), row.draw_rounds[own], {}};
    plan.input_ids.assign(static_cast<size_t>(width), 0);
    int64_t count = 0;
    const int64_t unread = row.size() - row.cached[own];
    if (!takes_part(row, level, &count) || unread > width) return plan;
    const int64_t waiting = level == n_ ? 0 : count;
    plan.part = 1;
    plan.count = unread;
    plan.first = unread - waiting - 1;
    CHECK(plan.first >= 0);
    if (!moving_) check_unread(row, level, count, unread);
    plan.length = count;
    plan.of_tail = row.scheduler.next().of_tail;
    CHECK_EQ(level == n_ ? plan.of_tail > 0 ? count : 0 : level == 1 ? row.tail : 0, plan.of_tail);
    plan.position = row.size() - waiting;
    std::copy(row.text.begin() + row.cached[own], row.text.end(), plan.input_ids.begin());
    return plan;
  }

  // The assumptions of a driver of a fixed order (round_state.hpp).
  void check_unread(const Row& row, int32_t level, int64_t count, int64_t unread) const {
    const size_t own = static_cast<size_t>(level - 1);
    int64_t most = std::max<int64_t>(row.lags[own], level) + (level == n_ ? 0 : count);
    if (level == n_ && row.scheduler.next().of_tail > 0 && n_ > 3) {
      seen.late_tails += unread > most;
      most += row.pending[0];
    }
    CHECK(unread <= most);
  }

  void step(int32_t level) {
    int64_t widest = 1, longest = 0;
    for (const Row& row : rows_) {
      int64_t count = 0;
      if (!takes_part(row, level, &count)) continue;
      widest = std::max(widest, row.size() - row.cached[static_cast<size_t>(level - 1)]);
      longest = std::max(longest, count);
    }
    if (widest > 1 && random_.chance(0.3)) {
      ++seen.too_wide;
      check_next(level, widest - 1);
    }
    check_next(level, widest + random_.below(3));

    Came came;
    came.width = std::max<int64_t>(level == n_ ? longest : longest + 1, 1) + random_.below(3);
    if (level == n_ && random_.chance(0.1)) came.width = 1 + random_.below(came.width);
    for (const Row& row : rows_) {
      came.eos.insert(came.eos.end(), row.eos.begin(), row.eos.end());
      int64_t count = 0;
      if (!takes_part(row, level, &count)) {
        any_outcome(level, &came);  // not to be looked at
      } else if (level == n_) {
        draft_outcome(row, count, &came);
      } else {
        verify_outcome(row, count, &came);
      }
    }
    const std::vector<int64_t> slots = state_->report(level, came);
    for (int64_t b = 0; b < batch(); ++b) {
      std::vector<int64_t> wanted(static_cast<size_t>(came.width), kPadding);
      enter(rows_[b], b, level, came, &wanted);
      for (int64_t i = 0; i < came.width; ++i) CHECK_EQ(wanted[i], slots[b * came.width + i]);
      check_line(rows_[b], b);
    }
  }

  void check_next(int32_t level, int64_t width) {
    const std::vector<Planned> plan = state_->next(level, width);
    for (int64_t b = 0; b < batch(); ++b) CHECK(expected_plan(rows_[b], level, width) == plan[b]);
  }

  void any_outcome(int32_t level, Came* came) {
    ++seen.idle;
    for (int64_t i = 0; i < came->width; ++i) came->tokens.push_back(random_.below(kVocab + 1) - 1);
    const int64_t statuses = level == n_ ? came->width : 1;
    for (int64_t i = 0; i < statuses; ++i)
      came->status.push_back(random_.chance(0.5) ? 0 : polyspec::kStatusNan);
    if (level != n_) came->counts.push_back(random_.below(9) - 1);
  }

  // Tokens and their status; tokens after the row's count, or after its EOS, do not matter.
  void draft_outcome(const Row& row, int64_t count, Came* came) {
    bool mine = true;
    for (int64_t i = 0; i < came->width; ++i) {
      mine = mine && i < count;
      const bool fails = random_.chance(mine ? 0.002 : 0.3);
      came->tokens.push_back(fails ? -1 : random_.below(kVocab));
      came->status.push_back(fails ? polyspec::kStatusInf : 0);
      mine = mine && !row.ends(came->tokens.back());
    }
  }

  // An accepted prefix of the pending tokens and a token after it; rarely an error.
  void verify_outcome(const Row& row, int64_t count, Came* came) {
    const int64_t accepted = random_.chance(0.4) ? count : random_.below(count + 1);
    const bool fails = random_.chance(0.004), note = random_.chance(0.1);
    const bool by_block = random_.chance(0.5);
    seen.notes += note && !fails;
    for (int64_t i = 0; i < came->width; ++i) {
      const bool stands = fails ? !by_block && i < accepted : i <= accepted;
      const int64_t token =
          i < accepted ? row.text[row.text.size() - count + i] : random_.below(kVocab);
      came->tokens.push_back(stands ? token : -1);
    }
    came->counts.push_back(accepted);
    came->status.push_back((fails ? polyspec::kStatusNan | polyspec::kStatusDraftRow : 0) |
                           (note ? polyspec::kStatusZeroResidual : 0));
  }

  // Applies `came` to the row as the test keeps it; and the slots of its distributions.
  void enter(Row& row, int64_t b, int32_t level, const Came& came, std::vector<int64_t>* place) {
    int64_t count = 0;
    if (!takes_part(row, level, &count)) {
      row.log.push_back(kIdle);
      return;
    }
    const bool draft = level == n_;
    const int64_t of_tail = row.scheduler.next().of_tail;
    seen.tails += draft && of_tail > 0;
    ++(draft ? seen.drafts : seen.verifications);
    const size_t own = static_cast<size_t>(level - 1);
    const int64_t start = row.size() - (draft ? 0 : count);
    const int64_t most = draft ? std::min(count, came.width) : came.counts[b] + 1;
    std::vector<int64_t> emitted;
    bool eos = false;
    int32_t error = 0;
    while (static_cast<int64_t>(emitted.size()) < most && !eos && error == 0) {
      const int64_t i = static_cast<int64_t>(emitted.size());
      error = came.status[draft ? b * came.width + i : b] & (polyspec::kStatusNotes - 1);
      if (error != 0) break;
      emitted.push_back(came.tokens[b * came.width + i]);
      eos = row.ends(emitted.back());
    }
    const int64_t e = static_cast<int64_t>(emitted.size());
    if (error != 0) {
      ++seen.failed;
      row.stopped = true;
      row.log.push_back({count, start, draft ? 0 : came.counts[b], e, 0, error, of_tail});
      return;
    }
    const int64_t accepted = draft ? 0 : std::min(came.counts[b], e);
    row.log.push_back({count, start, accepted, e, eos, draft ? 0 : came.status[b], of_tail});
    seen.ended += eos;
    seen.short_drafts += draft && e < count;
    row.text.resize(static_cast<size_t>(start));
    row.text.insert(row.text.end(), emitted.begin(), emitted.end());
    if (draft) {
      row.cached[own] = start + e - 1;
    } else {
      for (size_t i = own + 1; i < row.cached.size(); ++i)
        row.cached[i] = std::min(row.cached[i], start + accepted);
      row.cached[own] = start + accepted;
      row.pending[own] = row.blocks[own] = row.closed[own] = 0;
    }
    row.draw_rounds[own] += 1;
    row.scheduler.report(level, e, eos);
    if (level == 1) {
      row.room = row.scheduler.done() ? 0 : row.room - e;
      row.tail = 0;
      return;
    }
    const bool tail = draft && of_tail > 0;
    const size_t above = tail ? 0 : own - 1;
    for (int64_t i = 0; i < e; ++i) (*place)[i] = row.pending[above] + i;
    row.pending[above] += e;
    row.blocks[above] += !tail;
    row.closed[above] = eos ? 2 : tail || (draft && e < count);
    if (tail) row.tail = e;
    CHECK_EQ(row.scheduler.pending(static_cast<int32_t>(above) + 1), row.pending[above]);
  }

  void check_line(const Row& row, int64_t b) {
    CHECK_EQ(row.stopped ? 1 : 0, state_->header(b, Shape::kStopped));
    CHECK_EQ(row.size(), state_->header(b, Shape::kTotal));
    CHECK_EQ(row.room, state_->header(b, Shape::kRoom));
    CHECK_EQ(row.tail, state_->header(b, Shape::kTailPending));
    for (int32_t i = 1; i <= n_; ++i) {
      CHECK_EQ(row.cached[i - 1], state_->level(b, i, Shape::kCached));
      CHECK_EQ(row.draw_rounds[i - 1], state_->level(b, i, Shape::kRound));
      CHECK_EQ(row.pending[i - 1], state_->level(b, i, Shape::kPending));
      CHECK_EQ(row.blocks[i - 1], state_->level(b, i, Shape::kBlocks));
      CHECK_EQ(row.closed[i - 1], state_->level(b, i, Shape::kClosed));
    }
    for (int64_t i = 0; !row.stopped && i < row.size(); ++i)
      CHECK_EQ(row.text[i], state_->text(b, i));
    const int64_t steps = static_cast<int64_t>(row.log.size());
    CHECK_EQ(steps, state_->header(b, Shape::kStep));
    for (int64_t i = 0; i < steps; ++i) CHECK(row.log[i] == state_->log(b, i));
  }

  Random random_;
  bool moving_ = false;  // windows change, and steps come as they are due
  int32_t n_;            // levels
  std::vector<int64_t> windows_, rounds_;
  std::vector<Row> rows_;
  std::unique_ptr<StateRows> state_;
};

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 5000; ++seed) Batch(seed).play();
  std::printf(
      "%lld rounds of the target, %lld steps apart, %lld drafts, %lld verifications, %lld times "
      "idle, %lld "
      "too wide, %lld short, %lld ended, %lld notes, %lld errors, %lld tails, %lld late\n",
      static_cast<long long>(seen.target_rounds), static_cast<long long>(seen.wandered),
      static_cast<long long>(seen.drafts), static_cast<long long>(seen.verifications),
      static_cast<long long>(seen.idle), static_cast<long long>(seen.too_wide),
      static_cast<long long>(seen.short_drafts), static_cast<long long>(seen.ended),
      static_cast<long long>(seen.notes), static_cast<long long>(seen.failed),
      static_cast<long long>(seen.tails), static_cast<long long>(seen.late_tails));
  for (const int64_t times :
       {seen.wandered, seen.drafts, seen.verifications, seen.idle, seen.too_wide, seen.short_drafts,
        seen.ended, seen.notes, seen.failed, seen.tails, seen.late_tails}) {
    CHECK(times >= 100);
  }
  return 0;
}
