// The state row of a request: its text, and the pending tokens of each level. The driver's next
// step is read off this row, and its outcome is entered here, in the memory of the host or of a
// device: Scheduler (scheduler.hpp) is one row on the host, without a text, and the operators below
// work on the rows of a batch, on the CPU or a CUDA device, by the same functions.
//
// A round of the target is a sequence of steps; a step is a draft by level n, or a verification by
// one of the others. Three operators, each one launch: `schedule_due` names the step of every row,
// `schedule_next` before a step gives the tokens to read and which logits to keep,
// `schedule_report` after it enters the outcome. A row takes part in a step if this step is due for
// the row, and idles otherwise. No call allocates, waits for the device or reads a device value on
// the host.
//
// Where the rounds of all levels but the last two are bounded (kBound), the order of the steps is
// known beforehand: gather(n-1) is one draft, gather(i) is bound_i times gather(i+1) and a
// verification by level i+1, and a round of the target is gather(1) and its verification. A driver
// that follows this order need not look at the rows in between; other drivers call `schedule_due`.
// Level i reads at most the larger of i and its unread tokens at the begin of the round, and its
// pending tokens; with a tail, from four levels on, level n in the last draft also the pending
// tokens of level 1, which may be the first tokens of the round that it reads.
//
// Words of a row, int64. Positions count from the beginning of the text.
//   header  kTotal tokens of the text, kRoom tokens that the target may still emit, kStopped 1
//           after an error, kStep steps entered in the log, kTailWindow tokens of a tail at most,
//           kTailPending tokens of the tail among the tokens pending for the target
//   levels  n times: kCached leading tokens of the text in the level's cache, kRound rounds it has
//           done (they key its draws); and but for the drafter, kWindow tokens it waits for, kBound
//           blocks it waits for at most (0: no bound), and, pending for it, kPending tokens,
//           kBlocks blocks, kClosed 1 if nothing can be added, 2 if the last token ends the text
//   log     by step: kCount tokens to draft or to verify, -1 for a row without a part; kPosition of
//           the first of them; kAccepted; kEmitted, cut after an EOS; kEnded 1 if the last of them
//           ends the text; kStatus; kOfTail, how many of kCount belong to a tail
//   text    prompt, committed tokens, then the tokens pending for level 1, for level 2, and so on
//
// A tail (n >= 3): before the target verifies its pending tokens, which level 2 has verified, level
// n drafts up to kTailWindow more after them, at most as many as a draft has (kWindow of level n-1)
// and as there is room for, unless the last of them ends the text. The target verifies all of them
// in one pass, each against the distribution that it was drawn from: of the tail the distribution
// of level n.
#pragma once

#include <cstdint>

#include "polyspec/export.h"
#include "polyspec/philox.hpp"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

struct RoundShape {
  enum Header : int64_t { kTotal, kRoom, kStopped, kStep, kTailWindow, kTailPending, kHeader };
  enum Level : int64_t { kCached, kRound, kWindow, kBound, kPending, kBlocks, kClosed, kPerLevel };
  enum Log : int64_t { kCount, kPosition, kAccepted, kEmitted, kEnded, kStatus, kOfTail, kPerStep };

  int32_t levels = 0;    // n in [2, 2^16)
  int64_t steps = 0;     // s >= 0, steps that the log has room for
  int64_t capacity = 0;  // c >= 0, tokens that the text has room for

  POLYSPEC_HD int64_t level_at(int32_t level) const { return kHeader + (level - 1) * kPerLevel; }
  POLYSPEC_HD int64_t log_at() const { return kHeader + levels * kPerLevel; }
  POLYSPEC_HD int64_t text_at() const { return log_at() + steps * kPerStep; }
  POLYSPEC_HD int64_t words() const { return text_at() + capacity; }
};

struct RoundParams {
  RoundShape shape;
  int64_t batch = 0;         // b >= 0
  int64_t* state = nullptr;  // [b, shape.words()]
};

struct ScheduleDueParams {
  RoundParams in;
  // [2, b] the level of the due step, n for a draft and 0 where nothing is left to do; and the
  // number of tokens to draft or verify.
  int64_t* due = nullptr;
};
POLYSPEC_API Result schedule_due(const ScheduleDueParams& params, Stream stream = Stream::cpu());

// Rows of the table that schedule_next fills, each [b].
enum SchedulePlan : int64_t {
  kPlanPart,       // 1: the row takes part; 0: all else of it is 0 but position and round
  kPlanCounts,     // tokens that the level has to read, at the front of the row of input_ids
  kPlanFirst,      // the logits after this input token verify the first pending token
  kPlanLengths,    // tokens to draft or to verify
  kPlanPositions,  // absolute position of the first of these
  kPlanRounds,     // keys the draws
  kPlanOfTail,     // tokens of a tail among these: all or none of a draft
  kPlanRows,
};

struct ScheduleNextParams {
  RoundParams in;
  int32_t level = 0;             // of the step
  int64_t width = 0;             // t >= 1; a row that has more to read takes no part
  int64_t* input_ids = nullptr;  // [b, t] ids, 0 after the row's tokens
  int64_t* plan = nullptr;       // [kPlanRows, b]
  int64_t most = 0;              // m >= 0, tokens that a row verifies at most
  int64_t* pending = nullptr;    // [b, m] these, then 0
  // [b] the level reads from this position on, if it is below its cached length; or nullptr.
  const int64_t* unread = nullptr;
};
POLYSPEC_API Result schedule_next(const ScheduleNextParams& params, Stream stream = Stream::cpu());

struct ScheduleReportParams {
  RoundParams in;
  int32_t level = 0;                // of the step's schedule_next
  const int64_t* plan = nullptr;    // [kPlanRows, b] of the step's schedule_next
  int64_t width = 0;                // w >= 1
  const int64_t* tokens = nullptr;  // [b, w] drafted, or emitted by the verification
  // [b] accepted by the verification; of a draft, how many tokens were proposed, or nullptr for as
  // many as were asked for.
  const int64_t* counts = nullptr;
  const int32_t* status = nullptr;  // [b] of the verification, [b, w] of the draft's tokens
  int64_t num_eos = 0;              // e >= 0
  const int64_t* eos = nullptr;     // [b, e] ids that end a row's text; -1 is none
  // [2, b] how many tokens were pending for the level above (a tail's: for the target), and how
  // many of the emitted tokens follow them; none of the target's and where there is an error.
  int64_t* appended = nullptr;
  // [n, b] tokens that each level's cache may keep; may be nullptr.
  int64_t* kept = nullptr;
};
// A row with an error bit in its status, or with invalid words or numbers, stops: it takes no part
// in later steps. Invalid words (a length outside of the text, a negative count) are logged as
// kStatusBadLength; schedule_due names a draft for the row, schedule_next gives it no tokens.
POLYSPEC_API Result schedule_report(const ScheduleReportParams& params,
                                    Stream stream = Stream::cpu());

}  // namespace polyspec
