// Window policies: how many tokens each level of a chain waits for, chosen before every round of
// the target from the past rounds. Without tensors, separate from the scheduler.
//
// A policy gets the steps of the last round and the tokens that it committed, and chooses the
// windows of the next round. It never sees a draw to come (contract C2), so the emitted tokens keep
// the target's distribution with any windows. Windows that follow measured times differ from run to
// run, and with them which of the equally distributed texts a seed gives; at temperature 0 there is
// one text.
//
// Sources: Liu, Park and Shen, "A Drop-In Solution for On-the-Fly Adaptation of Speculative
// Decoding in LLMs" (ACL 2025) for kOnline, kFsm, kCachedFsm and kQLearning, with step sizes, keys
// and rewards that the paper does not state: they are chosen here and stated below. kJoint is ours.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "polyspec/export.h"

namespace polyspec {

// One step that a row took part in.
struct StepReport {
  int32_t level = 0;     // 1 ... n; n drafted, the others verified
  int64_t tokens = 0;    // verified or drafted in this row; of a tree: the depth of its paths
  int64_t accepted = 0;  // of the verified tokens; both in [0, kPolicyCount]
  int64_t width = 0;     // the most tokens of any row in the step, which its time depends on
  int64_t batch = 1;     // rows that took part
  double seconds = 0;    // wall time of the step, for all its rows; 0: not measured
  // Another row's report has the time. Of one row alone: `seconds` passed before the step while the
  // level read its unread tokens (windows above it were 0, or the prompt was left for later); the
  // report has no tokens, and its time is not the time of a width.
  bool repeated = false;
};

// A row's number is its index in the batch, not the request's: numbers are used again and again,
// and memory is kept for the largest.
constexpr int64_t kPolicyRows = int64_t{1} << 16;
// Tokens, rows and accepted tokens that a report may name, and the longest `guard_hold`.
constexpr int64_t kPolicyCount = (int64_t{1} << 31) - 1;

// The report of one row before its next round. Pointers are read during the call only.
struct RoundReport {
  int64_t row = 0;                    // in [0, kPolicyRows)
  bool begins = false;                // a text begins in the row; its history is forgotten
  const StepReport* steps = nullptr;  // [num_steps] of the round that is over, in order
  int64_t num_steps = 0;
  const int64_t* tokens = nullptr;  // [num_tokens] committed by it; the prompt where it begins
  int64_t num_tokens = 0;
  // Rows that are reported before the next round and take its steps together, this row included,
  // each reported once. kOnline and kJoint choose one set of windows for all of them, at the first
  // report, and the guard compares with plain decoding of this batch: a step takes as long as its
  // widest row wants. Only the first round of a batch that drafts at all has drafts of one row. 0
  // or 1: this row alone.
  int64_t batch = 1;
};

enum class PolicyKind : int32_t {
  // The windows of the options.
  kFixed = 0,
  // The paper's rule, level by level from the drafter upwards:
  //   argmax over 0 <= g <= max of (1 - A^{g+1}) / ((1 - A) (g a + b(g)))            (its Eq. 1)
  // with A = sum V / (sum V + number of rounds with a rejection) over the last `history`
  // verifications of the level, V tokens accepted in each, capped at `max_acceptance` (its Eq. 2,
  // the maximum-likelihood estimate of a censored geometric; while there are fewer verifications it
  // leans on .7), a the seconds per token of the drafter and b(g) the seconds to verify g tokens. A
  // level above the lowest that verifies counts whole rounds of the one below: r rounds bring r
  // times the mean tokens of one round, which need not be an integer g. After a round in which the
  // window of a level below the target was 0 that level forgets its oldest verification, so that it
  // comes back to .7 and is tried again.
  kOnline = 1,
  // A state machine per level with the window as the state: one up after a block that was accepted
  // whole, one down after a block of which less than half was accepted. A level above the lowest
  // that verifies moves by whole blocks from below.
  kFsm = 2,
  // kFsm, and a table from the last `ngram` tokens to the windows that fitted at their last
  // occurrence. N-grams of the prompt are entered as they are read, with no windows yet: where the
  // text comes back to one, the same tokens may follow again, and the lowest window is doubled.
  kCachedFsm = 3,
  // Tabular Q-learning per level: the state is the window and how the last block fared (none, less
  // than half, half or more, all accepted), the actions are one down, stay, one up, the reward of a
  // round is tokens per second over their running mean; step size `learning_rate`, discount
  // `discount`, and a random action with probability `exploration`. Among actions of equal value
  // the one of kFsm is taken.
  kQLearning = 4,
  // All windows together, by the renewal model (renewal.hpp), with the acceptance of every position
  // of every level estimated under exponential forgetting: a share by which `forgetting` weighs a
  // verification less than the one after it. A row's estimates lean on the estimates of all rows
  // until it has verifications itself.
  kJoint = 5,
};

struct PolicyOptions {
  PolicyKind kind = PolicyKind::kJoint;
  std::vector<int64_t> windows;  // [n-1] of the first round (see guard), or for good; target first
  std::vector<int64_t> max_windows;  // [n-1] never exceeded; empty: 16 for the drafter, else 32
  int64_t history = 64;              // kOnline: verifications looked at, >= 1
  double max_acceptance = 0.98;      // kOnline, kJoint: in (0, 1)
  double forgetting = 0.9;           // kJoint: in (0, 1]
  int64_t ngram = 3;                 // kCachedFsm: in [1, 8]
  double learning_rate = 0.2;        // kQLearning: in (0, 1]
  double discount = 0.5;             // kQLearning: in [0, 1)
  double exploration = 0.1;          // kQLearning: in [0, 1]
  uint64_t seed = 0;                 // kQLearning
  // Falls back to plain decoding, all windows 0, once rounds have lost `guard_loss` plain passes
  // against it, by their measured seconds, and tries again after `guard_hold` tokens, then twice as
  // many each time that the trial loses, 32 times at most. Trials are of 3 rounds. Gains before
  // make up for losses, but for twice `guard_loss` at most (a CUSUM with a floor): a block that
  // fails costs a plain pass or two, and does so now and then where speculation pays.
  //
  // Trials are paid for: a trial begins only when the loss of speculation since it last paid, the
  // loss of the last trial and the time of the levels below to read their unread tokens are
  // together at most `guard_share` of the tokens decoded plainly since. At most that share of all
  // time is lost, and the time of the first rounds until their loss is known. kOnline and kJoint,
  // which choose by measured times, decode one round plainly at first and then ask for two tokens
  // of each level: costs that rule speculation out are known after these two rounds. In a batch the
  // two tokens are asked of one row, and then of all rows, unless the levels below would take
  // longer than `guard_loss` passes to read their unread tokens, and the times of the one row rule
  // speculation out.
  bool guard = true;
  double guard_loss = 6;      // > 0
  int64_t guard_hold = 48;    // in [1, kPolicyCount]
  double guard_share = 0.02;  // > 0
};

// Not re-entrant: one policy is not to be used from two threads at once; two policies are.
class WindowPolicy {
 public:
  virtual ~WindowPolicy() = default;
  // Writes the windows [n-1] of the row's next round, each >= 0. A window of 0 lets the level
  // decode alone; the first one 0 is plain decoding. Throws std::invalid_argument, and changes
  // nothing, for a row, a level or a count out of its range.
  virtual void next(const RoundReport& report, int64_t* windows) = 0;
  // Forgets a row; its next report then begins a text; statistics of all rows stay. Throws
  // std::invalid_argument for a row out of range; a row without a report is ignored.
  virtual void forget_row(int64_t row) = 0;
  // Forgets all rows and times.
  virtual void reset() = 0;
  virtual int32_t levels() const = 0;  // n
};

// Throws std::invalid_argument for an option out of its range, naming it.
POLYSPEC_API std::unique_ptr<WindowPolicy> make_policy(PolicyOptions options);

}  // namespace polyspec
