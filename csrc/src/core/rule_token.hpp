// The token rule for one request: walk the block, stop at the first rejection (Leviathan et al.
// 2023).
//
// Rows after the first rejection are not read. At temperature 0 both distributions are one-hot and
// the rule is "keep what equals the argmax": draft rows are not read at all.
#pragma once

#include "core/verify_parts.hpp"

namespace polyspec::POLYSPEC_CORE {

// What became of a block: the tokens accepted, and the emission behind them unless status has an
// error.
struct Outcome {
  int64_t accepted = 0;
  int32_t status = 0;
  Emission last{};
};

constexpr int32_t kErrorMask = kStatusNotes - 1;

template <class T, class Group>
POLYSPEC_FN Outcome verify_greedy(Group& group, const Block<T>& block) {
  Outcome outcome;
  for (int64_t i = 0;; ++i) {
    outcome.accepted = i;
    outcome.status = target_argmax(group, block, i, &outcome.last);
    if (outcome.status != 0 || i == block.length) return outcome;
    const int64_t y = block.token(i);
    if (y < 0 || y >= block.params.vocab) {
      outcome.status = kStatusTokenOutOfRange;
      return outcome;
    }
    if (y != outcome.last.token) return outcome;
    if (group.rank() == 0) block.write(i, y, 0.0f, outcome.last.statistics);
  }
}

template <class T, class Group>
POLYSPEC_FN Outcome verify_token(Group& group, const Block<T>& block) {
  const int head = head_room(block.params.vocab);
  Outcome outcome;
  for (int64_t i = 0;; ++i) {
    outcome.accepted = i;
    RowStatistics p_statistics;
    outcome.status = target_statistics(group, block, i, &p_statistics);
    if (outcome.status != 0) return outcome;
    if (i == block.length) {
      outcome.last = emit_from_row(group, block, i, p_statistics, block.emit_draw(i));
      return outcome;
    }
    const int64_t y = block.token(i);
    if (y < 0 || y >= block.params.vocab) {
      outcome.status = kStatusTokenOutOfRange;
      return outcome;
    }
    RowStatistics q_statistics{0.0f, 0.0f, 1};
    if (!block.deterministic(i)) outcome.status = draft_statistics(group, block, i, &q_statistics);
    double ratio = 0.0;
    if (outcome.status == 0)
      outcome.status = acceptance_ratio(block, i, y, p_statistics, q_statistics, &ratio);
    if (outcome.status != 0) return outcome;
    if (!(block.accept_draw(i) < ratio)) {
      outcome.last =
          emit_correction(group, block, i, p_statistics, q_statistics, 1.0, &outcome.status);
      return outcome;
    }
    if (group.rank() == 0) {
      block.write(i, y, log_probability(block.target_row(i)[y], p_statistics, block.filter, head),
                  p_statistics);
    }
  }
}

}  // namespace polyspec::POLYSPEC_CORE
