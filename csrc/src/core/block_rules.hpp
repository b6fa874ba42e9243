// The rules for one request's block of draft tokens. At temperature 0 both distributions are
// one-hot, and either rule is "keep tokens that equal the argmax": draft rows are not read at all.
//
// The token rule (Leviathan et al. 2023, arXiv 2211.17192) stops at the first i with
// u_i >= p(y_i)/q(y_i); later rows are not read. The block rule (Sun et al. 2024, arXiv 2403.10444)
// verifies the block as a whole, and accepts its longest prefix i with u_i < h_i:
//
//   p_0 = 1, p_i = min(1, p_{i-1} p(y_i)/q(y_i)),  S_i = sum_x max(p_i p(x) - q(x), 0),
//   h_i = S_i / (S_i + 1 - p_i),  h_m = p_m.
//
// Either is one walk over the rows, and one for both: S_i belongs to row i, and the ratio of the
// next token needs the same distributions. p_i = 0 ends the walk, since every later h is 0 too. So
// does a row of the target where no token has probability: the block ends before it, h_i = p_i.
//
// A residual S_i is a pass over two rows, and few are needed: S_i <= p_i, so h_i <= p_i, and a row
// with u_i >= p_i ends no prefix. Of the other rows the last are remembered, and from the last on
// the first with u_i < h_i ends the longest prefix. Where none of them does the rows before are
// walked over once more.
#pragma once

#include "core/verify_parts.hpp"

namespace polyspec::POLYSPEC_CORE {

// Whether a call's blocks are verified as a whole: read from the call, or known when a kernel is
// compiled, which is then smaller.
struct RuleOfCall {
  POLYSPEC_FN static bool whole(const VerifyParams& params) { return params.rule == Rule::kBlock; }
};
template <Rule rule>
struct OneRule {
  POLYSPEC_FN static constexpr bool whole(const VerifyParams&) { return rule == Rule::kBlock; }
};

template <class T, Requests kind, class Group>
POLYSPEC_FN Outcome verify_greedy(Group& group, const Block<T, kind>& block) {
  Outcome outcome;
  for (int64_t i = 0;; ++i) {
    outcome.accepted = i;
    if (i == block.rows) return outcome;  // no row for a bonus
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

// Draft token i and p/q of it; error bits or 0. `q_error`: error bits of the draft's distribution.
template <class T, Requests kind>
POLYSPEC_FN int32_t ratio_at(const Block<T, kind>& block, int64_t i,
                             const RowStatistics& p_statistics, const RowStatistics& q_statistics,
                             int32_t q_error, int64_t* y, double* ratio) {
  *y = block.token(i);
  if (*y < 0 || *y >= block.params.vocab) return kStatusTokenOutOfRange;
  return q_error != 0 ? q_error : acceptance_ratio(block, i, *y, p_statistics, q_statistics, ratio);
}

// A row that the kept prefix may end before: its distributions and p_i, 1 under the token rule.
struct Ending {
  int64_t at;
  RowStatistics p, q;
  double scale;
};

// Above every h_i that is computed from p_i, for any rounding of sums and quotients.
POLYSPEC_FN double bound_of_h(double scale) { return scale * (1.0 + 0x1p-32); }

// Whether u_i < h_i for row i. Collective.
template <class T, Requests kind, class Group>
POLYSPEC_FN bool prefix_ends(Group& group, const Block<T, kind>& block, const Ending& row) {
  const Drawn left = draw_residual(
      group, residual_weight(block, row.at, block.token(row.at), row.p, row.q, row.scale, 1.0),
      false, 0);
  const double s = static_cast<double>(left.total) / mass_unit(head_room(block.params.vocab));
  const double h = s > 0.0 ? s / (s + (1.0 - row.scale)) : 0.0;  // s = 0: nothing to draw here
  return block.accept_draw(row.at - 1) < h;
}

// The token rule or the block rule, not for greedy requests. Rank 0 writes the tokens of the rows
// that were read, provisionally under the block rule: the caller blanks rejected tokens.
// Collective.
template <class Rules, class T, Requests kind, class Group>
POLYSPEC_FN Outcome verify_sampled(Group& group, const Block<T, kind>& block) {
  const VerifyParams& params = block.params;
  const bool whole = Rules::whole(params);
  const int head = head_room(params.vocab);
  Outcome outcome;
  constexpr int kEndings = Group::kEndings;
  Ending endings[kEndings];  // in turns; row i of count is endings[i % kEndings]
  int slot = 0;              // of the row that ends the prefix
  int64_t end = INT64_MAX;   // of the walk; the first one ends by the rules
  for (bool found = false; !found;) {
    int64_t count = 0;   // rows that may end the prefix
    double scale = 1.0;  // p_i; 1 under the token rule
    POLYSPEC_ROLLED
    for (int64_t i = 0; i < end && (i == 0 || scale > 0.0); ++i) {
      const bool behind = i == block.length;  // all draft tokens
      const double draw = whole && i > 0 ? block.accept_draw(i - 1) : 0.0;
      if (behind && !(draw < scale)) break;
      if (i == block.rows) {  // none for a bonus
        outcome.accepted = i;
        return outcome;
      }
      RowStatistics p_statistics;
      RowStatistics q_statistics{0.0f, 0.0f, 1};
      int32_t error;
      int32_t q_error;
      both_statistics(group, block, i, !behind && !block.deterministic(i), &p_statistics,
                      &q_statistics, &error, &q_error);
      if (error == 0 && behind) {
        outcome.accepted = i;
        outcome.last = emit_from_row(group, block, i, p_statistics, block.emit_draw(i));
        return outcome;
      }
      if (error == kStatusEmptyRow && !(draw < scale)) break;
      double ratio = 0.0;
      int64_t y = -1;
      if (error == 0) error = ratio_at(block, i, p_statistics, q_statistics, q_error, &y, &ratio);
      if (error != 0) {
        outcome.accepted = i;
        outcome.status = error;
        return outcome;
      }
      if (draw < bound_of_h(scale)) {
        if (whole) slot = static_cast<int>(count++ % kEndings);
        endings[slot] = {i, p_statistics, q_statistics, scale};
      }
      if (!whole && !(block.accept_draw(i) < ratio)) break;
      if (group.rank() == 0) {
        block.write(i, y, log_probability(block.target_row(i)[y], p_statistics, block.filter, head),
                    p_statistics);
      }
      if (whole) scale = scale * ratio < 1.0 ? scale * ratio : 1.0;
    }
    if (!whole) break;  // at the row that the walk ended with
    const int64_t remembered = count < kEndings ? count : kEndings;
    int64_t n = 0;
    do {
      ++n;
      slot = static_cast<int>((count - n) % kEndings);
      end = endings[slot].at;
      found = end == 0 || prefix_ends(group, block, endings[slot]);  // the empty prefix always is
    } while (kEndings > 1 && !found && n < remembered);
  }
  const Ending& kept = endings[slot];
  outcome.accepted = kept.at;
  const ResidualWeight<T, kind> weight =
      residual_weight(block, kept.at, block.token(kept.at), kept.p, kept.q, kept.scale, 1.0);
  outcome.last = emit_correction(group, block, kept.at, weight, !whole && has_sums(group, kept.at),
                                 kept.p, block.emit_draw(kept.at), &outcome.status);
  return outcome;
}

}  // namespace polyspec::POLYSPEC_CORE
