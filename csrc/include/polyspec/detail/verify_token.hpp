// The token rule for one request: walk the block, stop at the first rejection (Leviathan et al.
// 2023).
//
// Rows after the first rejection are not read. At temperature 0 both laws are one-hot and the rule
// is "keep what equals the argmax": draft rows are not read at all.
#pragma once

#include "polyspec/detail/verify_parts.hpp"

namespace polyspec::POLYSPEC_DETAIL {

// What became of a block: the tokens accepted, and the emission behind them unless status has an
// error.
struct Verdict {
  int64_t accepted = 0;
  int32_t status = 0;
  Emission last{};
};

constexpr int32_t kErrorMask = kStatusNotes - 1;

template <class T, class Group>
POLYSPEC_FN Verdict verify_greedy(Group& group, const Block<T>& block) {
  Verdict verdict;
  for (int64_t i = 0;; ++i) {
    verdict.accepted = i;
    verdict.status = target_argmax(group, block, i, &verdict.last);
    if (verdict.status != 0 || i == block.length) return verdict;
    const int64_t y = block.token(i);
    if (y < 0 || y >= block.params.vocab) {
      verdict.status = kStatusTokenOutOfRange;
      return verdict;
    }
    if (y != verdict.last.token) return verdict;
    if (group.rank() == 0) block.write(i, y, 0.0f, verdict.last.law);
  }
}

template <class T, class Group>
POLYSPEC_FN Verdict verify_token(Group& group, const Block<T>& block) {
  const int head = head_room(block.params.vocab);
  Verdict verdict;
  for (int64_t i = 0;; ++i) {
    verdict.accepted = i;
    RowLaw p_law;
    verdict.status = target_law(group, block, i, &p_law);
    if (verdict.status != 0) return verdict;
    if (i == block.length) {
      verdict.last = emit_from_law(group, block, i, p_law);
      return verdict;
    }
    const int64_t y = block.token(i);
    if (y < 0 || y >= block.params.vocab) {
      verdict.status = kStatusTokenOutOfRange;
      return verdict;
    }
    RowLaw q_law{0.0f, 0.0f, 1};
    if (!block.deterministic()) verdict.status = draft_law(group, block, i, &q_law);
    double ratio = 0.0;
    if (verdict.status == 0) verdict.status = acceptance_ratio(block, i, y, p_law, q_law, &ratio);
    if (verdict.status != 0) return verdict;
    if (!(block.accept_draw(i) < ratio)) {
      verdict.last = emit_from_residual(group, block, i, p_law, q_law, 1.0, &verdict.status);
      return verdict;
    }
    if (group.rank() == 0) {
      block.write(i, y, log_probability(block.target_row(i)[y], p_law, block.filter, head), p_law);
    }
  }
}

}  // namespace polyspec::POLYSPEC_DETAIL
