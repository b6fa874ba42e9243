// One row of schedule_next and schedule_report (device_scheduler.hpp). Integers and nothing else: a
// thread of a device and the CPU do the same.
#pragma once

#include "polyspec/detail/numeric.hpp"
#include "polyspec/device_scheduler.hpp"

namespace polyspec::POLYSPEC_DETAIL {

using Shape = ScheduleShape;

// The level that Scheduler::next() names, 0 when the row is done, and how many tokens it drafts or
// judges. Windows do not move within a round, so no level above one that has begun can be ready.
POLYSPEC_FN int32_t next_level(const ScheduleParams& p, const int64_t* words, int64_t* count) {
  int64_t room = words[Shape::kRoom];
  if (words[Shape::kStopped] != 0 || room <= 0) return 0;
  int64_t wanted = 0;
  for (int32_t level = 1; level < p.shape.levels; ++level) {
    const int64_t* own = words + p.shape.level_at(level);
    const int64_t window = p.windows[level - 1], rounds = p.rounds[level - 1];
    const int64_t want = window < room - 1 ? window : room - 1;
    if (own[Shape::kPending] >= want || (rounds > 0 && own[Shape::kBlocks] >= rounds) ||
        own[Shape::kClosed] != 0) {
      *count = own[Shape::kPending];
      return level;
    }
    wanted = want - own[Shape::kPending];
    room -= 1 + own[Shape::kPending];
  }
  *count = wanted;
  return p.shape.levels;
}

POLYSPEC_FN void next_row(const ScheduleNextParams& p, int64_t row) {
  const ScheduleParams& in = p.in;
  const int64_t* words = in.state + row * in.shape.words();
  const int64_t* own = words + in.shape.level_at(in.level);
  const int64_t* tail = words + in.shape.tail_at();
  const int64_t total = words[Shape::kTotal], unread = total - own[Shape::kCached];
  int64_t count = 0;
  const bool part = next_level(in, words, &count) == in.level && unread >= 1 && unread <= p.width;
  const int64_t waiting = in.level == in.shape.levels ? 0 : count;  // of the tokens in the tail
  int64_t* fed = p.fed + row * p.width;
  for (int64_t i = 0; i < p.width; ++i) {
    fed[i] = part && i < unread ? tail[own[Shape::kCached] + i] : 0;
  }
  int64_t* plan = p.plan + row;
  plan[kPlanPart * in.batch] = part;
  plan[kPlanCounts * in.batch] = part ? unread : 0;
  plan[kPlanFirst * in.batch] = part ? unread - waiting - 1 : 0;
  plan[kPlanLengths * in.batch] = part ? count : 0;
  plan[kPlanPositions * in.batch] = words[Shape::kOrigin] + total - (part ? waiting : 0);
  plan[kPlanRounds * in.batch] = own[Shape::kRound];
}

POLYSPEC_FN bool ends_text(const ScheduleReportParams& p, int64_t row, int64_t token) {
  for (int64_t i = 0; i < p.num_eos; ++i) {
    if (p.eos[row * p.num_eos + i] == token) return true;
  }
  return false;
}

// Error bits of the step up to and including its token `i`.
POLYSPEC_FN int32_t errors_at(const ScheduleReportParams& p, int64_t row, int64_t i) {
  const int32_t status = p.accepted == nullptr ? p.status[row * p.width + i] : p.status[row];
  return status & (kStatusNotes - 1);
}

POLYSPEC_FN void enter_step(const ScheduleReportParams& p, int64_t row) {
  const ScheduleParams& in = p.in;
  int64_t* words = in.state + row * in.shape.words();
  int64_t* place = p.place + row * p.width;
  for (int64_t i = 0; i < p.width; ++i) place[i] = p.nowhere;
  if (words[Shape::kStep] >= in.shape.steps) return;  // the log is full: the caller's mistake
  int64_t* log = words + in.shape.log_at() + words[Shape::kStep]++ * Shape::kPerStep;
  for (int64_t i = 0; i < Shape::kPerStep; ++i) log[i] = 0;
  if (p.plan[kPlanPart * in.batch + row] == 0) {
    log[Shape::kCount] = -1;
    return;
  }
  const bool draft = p.accepted == nullptr;
  const int64_t count = p.plan[kPlanLengths * in.batch + row];
  const int64_t start = words[Shape::kTotal] - (draft ? 0 : count);
  int64_t accepted = draft ? 0 : p.accepted[row];
  const bool impossible = accepted < 0 || accepted > count;
  int64_t most = draft ? count : impossible ? 0 : accepted + 1;
  if (most > p.width) most = p.width;
  if (most > in.shape.tail - start) most = in.shape.tail - start;

  int64_t* tail = words + in.shape.tail_at();
  int64_t emitted = 0;
  int32_t errors = impossible ? kStatusBadLength : 0;
  bool ended = false;
  while (emitted < most && !ended) {
    const int64_t token = p.tokens[row * p.width + emitted];
    errors = errors_at(p, row, emitted);
    if (errors == 0 && token < 0) errors = kStatusTokenOutOfRange;
    if (errors != 0) break;
    tail[start + emitted] = token;
    ended = ends_text(p, row, token);
    ++emitted;
  }
  if (accepted > emitted && errors == 0) accepted = emitted;
  log[Shape::kCount] = count;
  log[Shape::kAccepted] = accepted;
  log[Shape::kEmitted] = emitted;
  log[Shape::kEnded] = ended;
  log[Shape::kStatus] = errors != 0 || draft ? errors : p.status[row];
  if (errors != 0) {
    words[Shape::kStopped] = 1;
    return;
  }

  int64_t* own = words + in.shape.level_at(in.level);
  own[Shape::kRound] += 1;
  words[Shape::kTotal] = start + emitted;
  if (draft) {
    // The last token drawn was fed to nobody.
    own[Shape::kCached] = start + (emitted < p.width - 1 ? emitted : p.width - 1);
  } else {
    own[Shape::kCached] = start + count;
    own[Shape::kPending] = own[Shape::kBlocks] = own[Shape::kClosed] = 0;
    for (int32_t level = in.level; level <= in.shape.levels; ++level) {
      int64_t* cached = words + in.shape.level_at(level) + Shape::kCached;
      if (*cached > start + accepted) *cached = start + accepted;
    }
  }
  if (in.level == 1) {
    words[Shape::kRoom] = ended ? 0 : words[Shape::kRoom] - emitted;
    return;
  }
  int64_t* above = words + in.shape.level_at(in.level - 1);
  for (int64_t i = 0; i < emitted; ++i) place[i] = above[Shape::kPending] + i;
  above[Shape::kPending] += emitted;
  above[Shape::kBlocks] += 1;
  above[Shape::kClosed] = ended || (draft && emitted < count);
}

POLYSPEC_FN void report_row(const ScheduleReportParams& p, int64_t row) {
  enter_step(p, row);
  if (p.lengths == nullptr) return;
  const ScheduleParams& in = p.in;
  const int64_t* words = in.state + row * in.shape.words();
  for (int32_t level = 1; level <= in.shape.levels; ++level) {
    p.lengths[(level - 1) * in.batch + row] =
        words[Shape::kOrigin] + words[in.shape.level_at(level) + Shape::kCached];
  }
}

}  // namespace polyspec::POLYSPEC_DETAIL
