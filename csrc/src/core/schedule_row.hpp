// One state row (round_state.hpp). Integers and nothing else: a thread of a device, the CPU and
// Scheduler do the same.
#pragma once

#include "core/numeric.hpp"
#include "polyspec/round_state.hpp"

namespace polyspec::POLYSPEC_CORE {

using Shape = RoundShape;

POLYSPEC_FN bool within(int64_t value, int64_t most) { return value >= 0 && value <= most; }

POLYSPEC_FN bool is_done(const int64_t* words) {
  return words[Shape::kStopped] != 0 || words[Shape::kRoom] <= 0;
}

// Whether the words of a row can be: nothing that is added up overflows and, with a text, nothing
// that is read or written lies outside of it.
POLYSPEC_FN bool is_sound(const Shape& shape, const int64_t* words, bool with_text) {
  constexpr int64_t kMost = int64_t{1} << 62;
  const int64_t total = words[Shape::kTotal];
  if (with_text && !within(total, shape.capacity)) return false;
  if (words[Shape::kTailWindow] < 0 ||
      !within(words[Shape::kTailPending], words[shape.level_at(1) + Shape::kPending]))
    return false;
  int64_t left = with_text ? total : kMost;  // tokens that may be pending
  for (int32_t level = 1; level <= shape.levels; ++level) {
    const int64_t* own = words + shape.level_at(level);
    if (!within(own[Shape::kRound], kMost)) return false;
    if (with_text && !within(own[Shape::kCached], total)) return false;
    if (level == shape.levels) break;
    if (own[Shape::kWindow] < 0 || own[Shape::kBound] < 0 || !within(own[Shape::kBlocks], kMost) ||
        !within(own[Shape::kPending], left))
      return false;
    left -= own[Shape::kPending];
  }
  return true;
}

// The tail that level n drafts before the target verifies its pending tokens; 0: none left.
POLYSPEC_FN int64_t tail_length(const Shape& shape, const int64_t* words) {
  const int64_t* target = words + shape.level_at(1);
  // An existing tail has closed the pending tokens.
  if (shape.levels == 2 || target[Shape::kPending] == 0 || target[Shape::kClosed] != 0) return 0;
  const int64_t draft = words[shape.level_at(shape.levels - 1) + Shape::kWindow];
  int64_t length = words[Shape::kRoom] - 1 - target[Shape::kPending];
  if (length > draft) length = draft;
  if (length > words[Shape::kTailWindow]) length = words[Shape::kTailWindow];
  return length > 0 ? length : 0;
}

// The level of the due step, 0 when the row is done, how many tokens it drafts or verifies, and how
// many of these belong to a tail.
POLYSPEC_FN int32_t due_level(const Shape& shape, const int64_t* words, int64_t* count,
                              int64_t* of_tail) {
  *count = *of_tail = 0;
  if (is_done(words)) return 0;
  int64_t room = words[Shape::kRoom];
  // The lowest level with a round begun. A level above it must not run: its verification would
  // throw the tokens of that round away, which is lossless only if no policy has seen them. Only
  // windows that have changed can make this matter.
  int32_t lowest = shape.levels - 1;
  while (lowest > 1) {
    const int64_t* own = words + shape.level_at(lowest);
    if (own[Shape::kPending] != 0 || own[Shape::kClosed] != 0) break;
    --lowest;
  }
  int64_t wanted = 0;
  for (int32_t level = 1; level < shape.levels; ++level) {
    const int64_t* own = words + shape.level_at(level);
    const int64_t want = own[Shape::kWindow] < room - 1 ? own[Shape::kWindow] : room - 1;
    const bool full = own[Shape::kPending] >= want ||
                      (own[Shape::kBound] > 0 && own[Shape::kBlocks] >= own[Shape::kBound]);
    if (level >= lowest && (full || own[Shape::kClosed] != 0)) {
      const int64_t tail = level == 1 ? tail_length(shape, words) : 0;
      *count = tail > 0 ? tail : own[Shape::kPending];
      *of_tail = tail > 0 || level > 1 ? tail : words[Shape::kTailPending];
      return tail > 0 ? shape.levels : level;
    }
    wanted = want - own[Shape::kPending];
    room -= 1 + own[Shape::kPending];
  }
  *count = wanted;
  return shape.levels;
}

// The step of `level` over `count` tokens, `of_tail` of them of a tail, has emitted so many.
POLYSPEC_FN void advance(const Shape& shape, int64_t* words, int32_t level, int64_t count,
                         int64_t of_tail, int64_t emitted, bool ended) {
  int64_t* own = words + shape.level_at(level);
  const bool draft = level == shape.levels;
  own[Shape::kRound] += 1;
  if (!draft) own[Shape::kPending] = own[Shape::kBlocks] = own[Shape::kClosed] = 0;
  if (level == 1) {
    words[Shape::kRoom] = ended ? 0 : words[Shape::kRoom] - emitted;
    words[Shape::kTailPending] = 0;
    return;
  }
  if (draft && of_tail > 0) {
    int64_t* target = words + shape.level_at(1);
    target[Shape::kPending] += emitted;
    target[Shape::kClosed] = ended ? 2 : 1;
    words[Shape::kTailPending] = emitted;
    return;
  }
  int64_t* above = words + shape.level_at(level - 1);
  above[Shape::kPending] += emitted;
  above[Shape::kBlocks] += 1;
  // Fewer than asked for, or none: the drafter has no more this round.
  above[Shape::kClosed] = ended ? 2 : draft && emitted < count;
}

// A row with invalid words has a draft due; its report stops the row.
POLYSPEC_FN void due_row(const ScheduleDueParams& p, int64_t row) {
  const Shape& shape = p.in.shape;
  const int64_t* words = p.in.state + row * shape.words();
  int64_t count = 0, of_tail = 0;
  const bool sound = is_done(words) || is_sound(shape, words, false);
  p.due[row] = sound ? due_level(shape, words, &count, &of_tail) : shape.levels;
  p.due[p.in.batch + row] = count;
}

POLYSPEC_FN void next_row(const ScheduleNextParams& p, int64_t row) {
  const Shape& shape = p.in.shape;
  const int64_t* words = p.in.state + row * shape.words();
  const int64_t* own = words + shape.level_at(p.level);
  const int64_t* text = words + shape.text_at();
  const int64_t total = words[Shape::kTotal];
  int64_t cached = own[Shape::kCached];
  if (p.unread != nullptr && p.unread[row] < cached) cached = p.unread[row];
  const bool sound = is_sound(shape, words, true) && cached >= 0;
  const int64_t unread = sound ? total - cached : 0;
  int64_t count = 0, of_tail = 0;
  const bool due = sound && due_level(shape, words, &count, &of_tail) == p.level;
  const int64_t pending = p.level == shape.levels ? 0 : count;  // of the tokens of the text
  const bool part = due && unread > pending && unread <= p.width;
  int64_t* input_ids = p.input_ids + row * p.width;
  for (int64_t i = 0; i < p.width; ++i) {
    input_ids[i] = part && i < unread ? text[cached + i] : 0;
  }
  for (int64_t i = 0; i < p.most; ++i) {
    p.pending[row * p.most + i] = part && i < pending ? text[total - pending + i] : 0;
  }
  int64_t* plan = p.plan + row;
  const int64_t batch = p.in.batch;
  plan[kPlanPart * batch] = part;
  plan[kPlanCounts * batch] = part ? unread : 0;
  plan[kPlanFirst * batch] = part ? unread - pending - 1 : 0;
  plan[kPlanLengths * batch] = part ? count : 0;
  plan[kPlanPositions * batch] = total - (part ? pending : 0);
  plan[kPlanRounds * batch] = own[Shape::kRound];
  plan[kPlanOfTail * batch] = part ? of_tail : 0;
}

POLYSPEC_FN bool ends_text(const ScheduleReportParams& p, int64_t row, int64_t token) {
  for (int64_t i = 0; i < p.num_eos; ++i) {
    if (p.eos[row * p.num_eos + i] == token) return true;
  }
  return false;
}

POLYSPEC_FN void report_step(const ScheduleReportParams& p, int64_t row) {
  const Shape& shape = p.in.shape;
  int64_t* words = p.in.state + row * shape.words();
  int64_t* appended = p.appended + row;
  appended[0] = appended[p.in.batch] = 0;
  const int64_t step = words[Shape::kStep];
  if (step >= shape.steps) return;  // the log is full: the caller's mistake
  const bool sound = step >= 0 && is_sound(shape, words, true), stops = !sound && !is_done(words);
  if (stops) words[Shape::kStopped] = 1;
  if (step < 0) return;
  int64_t* log = words + shape.log_at() + step * Shape::kPerStep;
  words[Shape::kStep] = step + 1;
  for (int64_t i = 0; i < Shape::kPerStep; ++i) log[i] = 0;
  if (!sound || p.plan[kPlanPart * p.in.batch + row] == 0) {
    log[Shape::kCount] = stops ? 0 : -1;
    log[Shape::kStatus] = stops ? kStatusBadLength : 0;
    return;
  }
  const bool draft = p.level == shape.levels;
  const int64_t count = p.plan[kPlanLengths * p.in.batch + row];
  const int64_t of_tail = p.plan[kPlanOfTail * p.in.batch + row];
  const int64_t total = words[Shape::kTotal];
  const int64_t given = p.counts == nullptr ? count : p.counts[row];
  const int64_t start = draft ? total : within(count, total) ? total - count : -1;
  const bool impossible = given < 0 || given > count || start < 0;
  int64_t accepted = draft ? 0 : given;
  int64_t most = impossible ? 0 : draft ? given : given + 1;
  if (most > p.width) most = p.width;
  if (most > shape.capacity - start) most = shape.capacity - start;

  int64_t* text = words + shape.text_at();
  int64_t emitted = 0;
  int32_t errors = impossible ? kStatusBadLength : 0;
  bool ended = false;
  while (emitted < most && !ended) {
    const int64_t at = row * p.width + emitted;
    const int64_t token = p.tokens[at];
    errors = p.status[draft ? at : row] & (kStatusNotes - 1);
    if (errors == 0 && token < 0) errors = kStatusTokenOutOfRange;
    if (errors != 0) break;
    text[start + emitted] = token;
    ended = ends_text(p, row, token);
    ++emitted;
  }
  if (accepted > emitted && errors == 0) accepted = emitted;
  log[Shape::kCount] = count;
  log[Shape::kPosition] = start;
  log[Shape::kAccepted] = accepted;
  log[Shape::kEmitted] = emitted;
  log[Shape::kEnded] = ended;
  log[Shape::kStatus] = errors != 0 || draft ? errors : p.status[row];
  log[Shape::kOfTail] = of_tail;
  if (errors != 0) {
    words[Shape::kStopped] = 1;
    return;
  }

  words[Shape::kTotal] = start + emitted;
  int64_t* own = words + shape.level_at(p.level);
  if (draft) {
    // No pass has read the last token drawn. (A draft cut short may have read it; then it is read
    // again, so that there always is a token to read.)
    own[Shape::kCached] = start + emitted - 1;
  } else {
    own[Shape::kCached] = start + count;
    for (int32_t level = p.level; level <= shape.levels; ++level) {
      int64_t* cached = words + shape.level_at(level) + Shape::kCached;
      if (*cached > start + accepted) *cached = start + accepted;
    }
  }
  if (p.level > 1) {
    const int32_t above = draft && of_tail > 0 ? 1 : p.level - 1;
    appended[0] = words[shape.level_at(above) + Shape::kPending];
    appended[p.in.batch] = emitted;
  }
  advance(shape, words, p.level, count, of_tail, emitted, ended);
}

POLYSPEC_FN void report_row(const ScheduleReportParams& p, int64_t row) {
  report_step(p, row);
  if (p.kept == nullptr) return;
  const int64_t* words = p.in.state + row * p.in.shape.words();
  for (int32_t level = 1; level <= p.in.shape.levels; ++level) {
    p.kept[(level - 1) * p.in.batch + row] = words[p.in.shape.level_at(level) + Shape::kCached];
  }
}

}  // namespace polyspec::POLYSPEC_CORE
