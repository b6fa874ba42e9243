// polyspec::Scheduler: the host state machine of one chain, without tensors.
//
// A chain has n levels; level 1 is the target and level n the drafter (M_1 ... M_n in Wang et al.,
// ICML 2025). Level i < n verifies the tokens pending for it once windows[i-1] of them have come
// from below. The machine only counts: `next()` names the level, the kind of step and the number of
// tokens, `report()` enters the outcome. It is a state row (round_state.hpp) without a text, on the
// host, by the functions that the operators over the rows of a batch run as well.
//
// Windows are bounded by the room that max_new_tokens leaves. A verification of m tokens can emit m
// + 1, so a level with room for r tokens verifies at most r - 1 of them, and the level below it has
// room for the rest:
//   room_1 = max_new_tokens - committed,   want_i = min(windows[i-1], room_i - 1),
//   room_{i+1} = room_i - 1 - pending_i.
// Level i is ready when pending_i >= want_i, when rounds[i-1] blocks have come from below, or when
// its pending tokens cannot grow: the last one ends the text, or the drafter had no more to
// propose. A block may overshoot its window, since a level hands up all its emitted tokens.
//
// With a tail, level n drafts once more before level 1 verifies (round_state.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "polyspec/export.h"
#include "polyspec/round_state.hpp"

namespace polyspec {

struct Step {
  enum class Kind : int32_t {
    kDraft = 0,  // level n proposes up to `count` >= 1 tokens
    // Level `level` verifies its `count` >= 0 pending tokens; 0: a plain decoding step.
    kVerify = 1,
    kDone = 2,  // nothing is left to do; level and count are 0
  };
  Kind kind = Kind::kDone;
  int32_t level = 0;  // 1 ... n
  int64_t count = 0;
  // How many of them belong to a tail: all or none of a draft, which are then pending for level 1,
  // and the last of the tokens that level 1 verifies.
  int64_t of_tail = 0;
};

// Not re-entrant: one scheduler is not to be used from two threads at once.
class POLYSPEC_API Scheduler {
 public:
  // windows[i-1] is the number of tokens level i waits for, i = 1 ... n-1 ({mu, K} there, for
  // three levels). A window of 0 means that the level decodes alone. Throws std::invalid_argument
  // for an empty list, for 2^16 levels or more (the limit of the draws' key), or for a negative
  // window. No request is running: done() holds.
  //
  // rounds[i-1] bounds how often level i waits: it verifies its pending tokens once so many blocks
  // have come from the level below, full window or not; 0 is no bound, and an empty list bounds no
  // level. The work of a bounded round is known before its tokens are, so a driver need not look at
  // them in between, and the rows of a batch do not wait for each other. Throws
  // std::invalid_argument for another number of rounds than of windows, or a negative one.
  explicit Scheduler(std::vector<int64_t> windows, std::vector<int64_t> rounds = {});

  // Begins a request that may emit `max_new_tokens` >= 0 tokens. Forgets the pending tokens; the
  // windows stay. Throws std::invalid_argument for a negative count.
  void start(int64_t max_new_tokens);

  // The next step. Does not change the state: calling it twice gives the same step.
  // No step can lead past max_new_tokens.
  Step next() const;

  // Enters the outcome of the step that `next()` named. A drafting step brings 0 <= emitted <=
  // count tokens; fewer than count means that the drafter has no more this round, and the level
  // above verifies its pending tokens. A verification brings 1 <= emitted <= count + 1: the
  // accepted prefix and the correction or bonus, cut after the first EOS. `eos`: the last emitted
  // token ends the text. Throws std::logic_error, and changes nothing, if `next()` names another
  // level, if nothing is left to do, or if the count is out of range; a pending EOS allows no
  // bonus.
  void report(int32_t level, int64_t emitted, bool eos = false);

  // Changes the windows from the next step on; the number of levels stays. A smaller window never
  // discards sampled tokens: tokens pending further down are verified first (contract C2: a policy
  // may have looked at these tokens). Throws std::invalid_argument for another number of windows or
  // a negative one.
  void set_windows(std::vector<int64_t> windows);

  // Tokens of a tail at most, from the next one on; 0, as it is at first, is none. Throws
  // std::invalid_argument for a negative number, or for a tail of a chain of two levels.
  void set_tail(int64_t tail);

  int32_t levels() const { return shape_.levels; }
  const std::vector<int64_t>& windows() const { return windows_; }
  const std::vector<int64_t>& rounds() const { return rounds_; }
  int64_t tail() const { return words_[RoundShape::kTailWindow]; }
  // Tokens waiting to be verified by level 1 ... n-1, for level 1 a tail's as well. Throws
  // std::out_of_range for any other level.
  int64_t pending(int32_t level) const;
  int64_t committed() const { return committed_; }  // tokens the target has emitted
  bool done() const { return words_[RoundShape::kRoom] == 0; }

 private:
  RoundShape shape_;
  std::vector<int64_t> words_;             // the state row
  std::vector<int64_t> windows_, rounds_;  // [n-1]
  int64_t committed_ = 0;
};

}  // namespace polyspec
