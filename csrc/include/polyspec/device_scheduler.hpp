// The Scheduler where the tokens are: a round of the target without a look at the device.
//
// Scheduler (scheduler.hpp) needs to be told what every step has brought, so a driver that follows
// it reads the counts of every verification, of every level. Where the rounds of all levels but the
// last two are bounded (`rounds`), the order of the steps is known beforehand: gather(n-1) is one
// draft, gather(i) is rounds[i-1] times gather(i+1) and a verification by level i+1, and a round of
// the target is gather(1) and its verification. What is not known, how many tokens of which row
// wait for whom, is kept here, in one line of integers per row on the device. A row takes part in
// a step if the step is the one that Scheduler::next() would name for it, and idles otherwise; the
// rows' steps, their counts and so their draws are exactly Scheduler's. A log of all steps lies in
// the same lines, so that the host learns everything from one copy.
//
// Two operators, each one launch: `schedule_next` before a step gives the tokens to read,
// `schedule_report` behind it enters what came of it. No call allocates, waits for the device or
// reads a device value on the host.
//
// A row's line, in words of int64 (positions in the tail are relative to `kOrigin`):
//   header   kTotal tokens in the tail, kOrigin absolute position of its first, kRoom tokens that
//            the target may still emit, kStopped 1 after an error, kStep steps entered in the log
//   levels   n times kCached leading tokens of the tail in the level's cache, kRound its rounds so
//            far (they key its draws), and, of what waits to be judged by it, kPending tokens,
//            kBlocks blocks, kClosed 1 if nothing can be added
//   tail     the latest committed tokens that not every cache holds, then what is pending for level
//            1, for level 2, and so on
//   log      by step: kCount tokens drafted or judged, -1 for a row without a part; kAccepted;
//            kEmitted, cut behind an EOS; kEnded 1 if the last of them ends the text; kStatus
#pragma once

#include <cstdint>

#include "polyspec/export.h"
#include "polyspec/philox.hpp"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

struct ScheduleShape {
  static constexpr int32_t kMaxLevels = 16;
  enum Header : int64_t { kTotal, kOrigin, kRoom, kStopped, kStep, kHeader };
  enum Level : int64_t { kCached, kRound, kPending, kBlocks, kClosed, kPerLevel };
  enum Log : int64_t { kCount, kAccepted, kEmitted, kEnded, kStatus, kPerStep };

  int32_t levels = 0;  // n in [2, kMaxLevels]
  int64_t tail = 0;    // c >= 1, tokens
  int64_t steps = 0;   // s >= 0, steps that the log has room for

  POLYSPEC_HD int64_t level_at(int32_t level) const { return kHeader + (level - 1) * kPerLevel; }
  POLYSPEC_HD int64_t tail_at() const { return kHeader + levels * kPerLevel; }
  POLYSPEC_HD int64_t log_at() const { return tail_at() + tail; }
  POLYSPEC_HD int64_t words() const { return log_at() + steps * kPerStep; }
};

// What both operators are told. `level` is the one whose step it is: n drafts, the others judge.
struct ScheduleParams {
  ScheduleShape shape;
  int64_t windows[ScheduleShape::kMaxLevels - 1] = {};  // n-1 of them, as of Scheduler
  int64_t rounds[ScheduleShape::kMaxLevels - 1] = {};
  int64_t batch = 0;         // b >= 0
  int32_t level = 0;         // 1 ... n
  int64_t* state = nullptr;  // [b, shape.words()]
};

// Rows of the table that schedule_next fills, each [b].
enum SchedulePlan : int64_t {
  kPlanPart,       // 1: the row takes part; 0: all else of it is 0 but position and round
  kPlanCounts,     // tokens that the level has to read, at the front of the row of `fed`
  kPlanFirst,      // the logits behind this one of them judge the first pending token
  kPlanLengths,    // tokens to draft or to judge
  kPlanPositions,  // absolute position of the first of these
  kPlanRounds,     // keys the draws
  kPlanRows,
};

struct ScheduleNextParams {
  ScheduleParams in;
  int64_t width = 0;        // t >= 1; a row that has more to read takes no part
  int64_t* fed = nullptr;   // [b, t] ids, 0 behind a row's own
  int64_t* plan = nullptr;  // [kPlanRows, b]
};
POLYSPEC_API Result schedule_next(const ScheduleNextParams& params, Stream stream = Stream::cpu());

struct ScheduleReportParams {
  ScheduleParams in;
  const int64_t* plan = nullptr;      // [kPlanRows, b] of the step's schedule_next
  int64_t width = 0;                  // w >= 1
  const int64_t* tokens = nullptr;    // [b, w] drafted, or emitted by the verification
  const int64_t* accepted = nullptr;  // [b] of the verification; nullptr for a draft
  const int32_t* status = nullptr;    // [b] of the verification, [b, w] of the draft's tokens
  int64_t num_eos = 0;                // e >= 0
  const int64_t* eos = nullptr;       // [b, e] ids that end a row's text; -1 is none
  // [b, w] where the law of each emitted token belongs among those that wait for the level above,
  // and `nowhere` for the others.
  int64_t* place = nullptr;
  int64_t nowhere = 0;
  // [n, b] tokens that each level's cache may keep, from the text's beginning; may be nullptr.
  int64_t* lengths = nullptr;
};
// A row whose status has an error bit, or whose numbers cannot be, stops: it takes no part in later
// steps.
POLYSPEC_API Result schedule_report(const ScheduleReportParams& params,
                                    Stream stream = Stream::cpu());

}  // namespace polyspec
