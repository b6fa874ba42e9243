// The block rule for one request (Sun et al. 2024, arXiv 2403.10444): the block is verified as a
// whole, and its longest prefix i with u_i < h_i stands.
//
//   p_0 = 1, p_i = min(1, p_{i-1} p(y_i)/q(y_i)),  S_i = sum_x max(p_i p(x) - q(x), 0),
//   h_i = S_i / (S_i + 1 - p_i),  h_m = p_m.
//
// One sweep over the rows: S_i belongs to row i, whose distributions the ratio of the next token
// needs anyway. p_i = 0 ends the sweep, since every later h is 0 too.
#pragma once

#include "core/rule_token.hpp"

namespace polyspec::POLYSPEC_CORE {

template <class T, class Group>
POLYSPEC_FN Outcome verify_block(Group& group, const Block<T>& block) {
  const VerifyParams& params = block.params;
  const int head = head_room(params.vocab);
  Outcome outcome;
  RowStatistics kept_p{0.0f, 0.0f,
                       1};  // the distributions of the row that the kept prefix ends before
  RowStatistics kept_q{0.0f, 0.0f, 1};
  double kept_scale = 1.0;
  double scale = 1.0;  // p_i
  for (int64_t i = 0; i < block.length && scale > 0.0; ++i) {
    RowStatistics p_statistics;
    RowStatistics q_statistics{0.0f, 0.0f, 1};
    int32_t error = target_statistics(group, block, i, &p_statistics);
    const int64_t y = block.token(i);
    if (error == 0 && (y < 0 || y >= params.vocab)) error = kStatusTokenOutOfRange;
    if (error == 0 && !block.deterministic(i))
      error = draft_statistics(group, block, i, &q_statistics);
    double ratio = 0.0;
    if (error == 0) error = acceptance_ratio(block, i, y, p_statistics, q_statistics, &ratio);
    if (error != 0) {
      outcome.accepted = i;
      outcome.status = error;
      return outcome;
    }
    double h = i == 0 ? 1.0 : 0.0;  // the empty prefix always stands
    if (i > 0) {
      const uint64_t total =
          sum_tiles(group, params.vocab,
                    residual_weight(block, i, y, p_statistics, q_statistics, scale, 1.0));
      const double s = static_cast<double>(total) / mass_unit(head);
      h = s > 0.0 ? s / (s + (1.0 - scale)) : 0.0;  // s = 0: nothing could be drawn here
    }
    if (i == 0 || block.accept_draw(i - 1) < h) {
      outcome.accepted = i;
      kept_p = p_statistics;
      kept_q = q_statistics;
      kept_scale = scale;
    }
    if (group.rank() == 0) {
      // Provisional: the caller blanks what does not stand.
      block.write(i, y, log_probability(block.target_row(i)[y], p_statistics, block.filter, head),
                  p_statistics);
    }
    scale *= ratio;
    scale = scale < 1.0 ? scale : 1.0;
  }
  if (block.length == 0 || (scale > 0.0 && block.accept_draw(block.length - 1) < scale)) {
    outcome.accepted = block.length;
    RowStatistics p_statistics;
    outcome.status = target_statistics(group, block, block.length, &p_statistics);
    if (outcome.status == 0) {
      outcome.last =
          emit_from_row(group, block, block.length, p_statistics, block.emit_draw(block.length));
    }
    return outcome;
  }
  outcome.last =
      emit_correction(group, block, outcome.accepted, kept_p, kept_q, kept_scale, &outcome.status);
  return outcome;
}

}  // namespace polyspec::POLYSPEC_CORE
