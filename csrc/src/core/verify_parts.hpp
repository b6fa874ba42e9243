// Parts of the verification rules: the block's view of one request, acceptance and residual.
//
// A view of a request (Block here, Tree in rule_tree.hpp) has `params`, `filter`, target_row(i),
// and for the proposal after row i: deterministic(i), draft_row(i) and statistics_at(i), where the
// caller passed its row's statistics.
#pragma once

#include "core/request.hpp"
#include "polyspec/verify.hpp"

namespace polyspec::POLYSPEC_CORE {

// A draft's row among requests of a kind: of the target's type T, or of any.
template <class T, Requests kind>
using DraftRow = std::conditional_t<kind == Requests::kAny, AnyRow, Row<T>>;
template <class RowType>
POLYSPEC_FN RowType draft_row_at(const void* base, DType dtype, int64_t offset, int64_t n) {
  if constexpr (std::is_same_v<RowType, AnyRow>) {
    return {elements_at<Any>(base, dtype, offset), n};
  } else {
    return row_at<typename RowType::Element>(base, dtype, offset, n);
  }
}

// The mask of a request's row i of the target, nullptr where rows are not masked.
template <class T, class Params>
POLYSPEC_FN const int32_t* allowed_row(const Params& params, int64_t request, int64_t i) {
  if constexpr (kIsMasked<T>) {
    const int64_t* offsets = params.offsets;
    const int64_t at = offsets != nullptr ? offsets[request] * params.allowed_stride[1]
                                          : request * params.allowed_stride[0];
    return params.allowed + at + i * params.allowed_stride[1];
  } else {
    return nullptr;
  }
}

// One request's block. Row i of target and draft verify draft token i.
template <class T, Requests kind = Requests::kAny>
struct Block {
  const VerifyParams& params;
  int64_t request;
  int64_t slot = 0;          // of its parameters
  int64_t length = 0;        // draft tokens
  int64_t rows = 0;          // of the target: one more, or as many, and then there is no bonus
  int64_t room = INT64_MAX;  // most tokens that may be emitted
  int64_t target_at = 0;     // its first index in: target logits, draft tokens, draft rows' ids
  int64_t tokens_at = 0;
  int64_t ids_at = 0;
  Filter<kind> filter{};
  Draws draws{};

  POLYSPEC_FN Block(const VerifyParams& params, int64_t request)
      : params(params), request(request) {}

  POLYSPEC_FN Row<T> target_row(int64_t i) const {
    return row_at<T>(params.target_logits, params.target_dtype,
                     target_at + i * params.target_stride[1], params.vocab,
                     allowed_row<T>(params, request, i));
  }
  // Where the draft's row of token i lies; with a pool its id, which must be in range.
  POLYSPEC_FN int64_t row_id(int64_t i) const { return params.draft_rows[ids_at + i]; }
  POLYSPEC_FN DraftRow<T, kind> draft_row(int64_t i) const {
    const int64_t at = params.draft_rows != nullptr
                           ? row_id(i) * params.draft_stride[1]
                           : request * params.draft_stride[0] + i * params.draft_stride[1];
    return draft_row_at<DraftRow<T, kind>>(params.draft_logits, params.draft_dtype, at,
                                           params.draft_vocab);
  }
  POLYSPEC_FN bool draft_row_exists(int64_t i) const {
    return params.draft_rows == nullptr || (row_id(i) >= 0 && row_id(i) < params.num_draft_rows);
  }
  POLYSPEC_FN const RowStatistics& statistics_at(int64_t i) const {
    return params.draft_statistics[params.draft_rows != nullptr ? row_id(i)
                                                                : request * params.draft_len + i];
  }
  POLYSPEC_FN bool deterministic(int64_t i) const {
    return params.draft_rows != nullptr ? row_id(i) == -1 : params.draft_logits == nullptr;
  }
  POLYSPEC_FN int64_t token(int64_t i) const { return params.draft_tokens[tokens_at + i]; }
  // Whether the last of so many draft tokens is the input of no row.
  POLYSPEC_FN bool unread(int64_t tokens) const { return tokens > 0 && tokens == rows; }
  POLYSPEC_FN double accept_draw(int64_t i) const {
    return open_unit(draws.at(i, i, Purpose::kAccept));
  }
  POLYSPEC_FN uint64_t emit_draw(int64_t i) const {
    return draws.at(i, params.draft_len, Purpose::kEmit);
  }
  // Writes one emitted token; rank 0 only.
  POLYSPEC_FN void write(int64_t i, int64_t token, float logprob,
                         const RowStatistics& statistics) const {
    const int64_t at = request * (params.draft_len + 1) + i;
    params.tokens[at] = token;
    params.logprobs[at] = logprob;
    if (params.statistics != nullptr) params.statistics[at] = statistics;
  }
  // Fills the outputs after the last emitted token; rank 0 only.
  POLYSPEC_FN void pad(int64_t from) const {
    POLYSPEC_ROLLED
    for (int64_t i = from; i <= params.draft_len; ++i)
      write(i, -1, kNan, RowStatistics{0.0f, 0.0f, 0});
  }
};

// The outcome of a block or tree: the tokens accepted, and the emission after them unless status
// has an error.
struct Outcome {
  int64_t accepted = 0;
  int32_t status = 0;
  Emission last{};
};

constexpr int32_t kErrorMask = kStatusNotes - 1;

// Draft id of a target token, -1 where the draft cannot propose it.
template <class Params>
POLYSPEC_FN int64_t draft_id(const Params& params, int64_t token) {
  if (params.target_to_draft != nullptr) return params.target_to_draft[token];
  return token < params.draft_vocab ? token : -1;
}

// The target's argmax of row i; error bits or 0. Collective.
template <class Group, class View>
POLYSPEC_FN int32_t target_argmax(Group& group, const View& view, int64_t i, Emission* emission) {
  return greedy_emission(group, view.target_row(i), emission);
}

// The draft's distribution of row i, unless its row has to be read: returns whether it has. Not for
// deterministic proposals.
template <class View>
POLYSPEC_FN bool must_read_draft(const View& view, int64_t i, RowStatistics* statistics,
                                 int32_t* error) {
  if (!view.draft_row_exists(i)) {
    *error = kStatusBadIndex | kStatusDraftRow;
    return false;
  }
  if (view.params.draft_statistics == nullptr) return true;
  *statistics = view.statistics_at(i);  // acceptance_ratio checks it
  return false;
}

// The target's distribution of row i, its tile sums left in scratch, and, if a proposal was `drawn`
// there, the draft's: error bits or 0 of each. A draft's row of the target's type is reduced by the
// code that reduces the target's, in a loop, since inlined twice that would be the most of a
// kernel. Collective.
template <class Group, class T, Requests kind, template <class, Requests> class View>
POLYSPEC_FN void both_statistics(Group& group, const View<T, kind>& view, int64_t i, bool drawn,
                                 RowStatistics* p, RowStatistics* q, int32_t* p_error,
                                 int32_t* q_error) {
  const auto& params = view.params;
  *q_error = 0;
  bool of_target = !(drawn && must_read_draft(view, i, q, q_error));
  if constexpr (kind == Requests::kAny && !std::is_same_v<Plain<T>, Any>) {
    if (!of_target && params.draft_dtype != kDTypeOf<T>) {
      const AnyRow row = view.draft_row(i);
      const int32_t error =
          row_statistics(group, row, view.filter, head_room(params.draft_vocab), q);
      *q_error = error == 0 ? 0 : error | kStatusDraftRow;
      of_target = true;
    }
  }
  POLYSPEC_ROLLED
  for (;; of_target = true) {
    const Row<T> row = of_target ? view.target_row(i) : as_row<T>(view.draft_row(i));
    RowStatistics found;
    const int32_t error = row_statistics(group, row, view.filter, head_room(row.n), &found);
    if (of_target) {
      *p = found;
      *p_error = error;
      return;
    }
    *q = found;
    *q_error = error == 0 ? 0 : error | kStatusDraftRow;
  }
}

// The draft's mass of token y of row i, which was drawn from it, so that it is not 0; error bits or
// 0.
template <class View>
POLYSPEC_FN int32_t draft_mass(const View& view, int64_t i, int64_t y,
                               const RowStatistics& q_statistics, uint64_t* mass) {
  const auto& params = view.params;
  const int64_t y_draft = draft_id(params, y);
  if (y_draft < 0 || y_draft >= params.draft_vocab) return kStatusDraftStatisticsMismatch;
  const int head = head_room(params.draft_vocab);
  const auto row = view.draft_row(i);
  const float z = row[y_draft];
  *mass = token_mass(row, q_statistics, view.filter, head).of(z);
  const bool possible =
      possible_statistics(q_statistics, view.filter, head, params.draft_vocab, z, *mass);
  return possible ? 0 : kStatusDraftStatisticsMismatch;
}

// p(y)/q(y) for draft token y of row i, q = 1 for a deterministic proposal; error bits or 0. The
// quotient is exact up to double rounding, and exactly 1 for equal distributions.
template <class View>
POLYSPEC_FN int32_t acceptance_ratio(const View& view, int64_t i, int64_t y,
                                     const RowStatistics& p_statistics,
                                     const RowStatistics& q_statistics, double* ratio) {
  const auto p =
      token_mass(view.target_row(i), p_statistics, view.filter, head_room(view.params.vocab));
  const double p_mass = static_cast<double>(p(y));
  const double p_total = static_cast<double>(p_statistics.mass);
  if (view.deterministic(i)) {
    *ratio = p_mass / p_total;
    return 0;
  }
  uint64_t own;
  const int32_t error = draft_mass(view, i, y, q_statistics, &own);
  if (error != 0) return error;
  *ratio = (p_mass * static_cast<double>(q_statistics.mass)) / (static_cast<double>(own) * p_total);
  return 0;
}

// Integer masses of max(a p - b q, 0) in units of 2^-(62 - head): the distribution drawn from after
// a rejection.
template <class T, Requests kind = Requests::kAny>
struct ResidualWeight {
  TokenMass<Row<T>, Filter<kind>::kMayCut> p;
  TokenMass<DraftRow<T, kind>, Filter<kind>::kMayCut> q;
  double p_scale;  // a / total mass of p
  double q_scale;  // b / total mass of q
  double unit;
  const int32_t* target_to_draft;
  int64_t draft_vocab;
  int64_t proposed;  // deterministic proposal: q is one-hot here; else -1

  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    const double left = static_cast<double>(p(i)) * p_scale - draft_share(i);
    return left > 0.0 ? static_cast<uint64_t>(static_cast<int64_t>(left * unit)) : 0;
  }
  // b q(i).
  POLYSPEC_FN double draft_share(int64_t i) const {
    if (proposed >= 0) return i == proposed ? 1.0 : 0.0;
    const int64_t j = target_to_draft != nullptr ? target_to_draft[i] : i;
    return j >= 0 && j < draft_vocab ? static_cast<double>(q(j)) * q_scale : 0.0;
  }
  // Whether a token drawn from p, with a test's draw in (0, 1), is one drawn from the residual:
  // with probability max(0, 1 - b q(i) / (a p(i))).
  POLYSPEC_FN bool keeps(int64_t i, double draw) const {
    const double whole = static_cast<double>(p(i)) * p_scale;
    return draw * whole < whole - draft_share(i);
  }
};

// max(p_scale p - q_scale q, 0) of row i; a deterministic proposal is one-hot at token y.
template <class T, Requests kind, template <class, Requests> class View>
POLYSPEC_FN ResidualWeight<T, kind> residual_weight(const View<T, kind>& view, int64_t i, int64_t y,
                                                    const RowStatistics& p_statistics,
                                                    const RowStatistics& q_statistics,
                                                    double p_scale, double q_scale) {
  const auto& params = view.params;
  const int head = head_room(params.vocab);
  ResidualWeight<T, kind> weight{token_mass(view.target_row(i), p_statistics, view.filter, head),
                                 {},
                                 p_scale / static_cast<double>(p_statistics.mass),
                                 0.0,
                                 mass_unit(head),
                                 params.target_to_draft,
                                 params.draft_vocab,
                                 y};
  if (!view.deterministic(i)) {
    weight.q =
        token_mass(view.draft_row(i), q_statistics, view.filter, head_room(params.draft_vocab));
    weight.q_scale = q_scale / static_cast<double>(q_statistics.mass);
    weight.proposed = -1;
  }
  return weight;
}

// The token that `bits` draw from row i's distribution, with tile sums in scratch. Collective.
template <class Group, class View>
POLYSPEC_FN Emission emit_from_row(Group& group, const View& view, int64_t i,
                                   const RowStatistics& statistics, uint64_t bits) {
  const int head = head_room(view.params.vocab);
  const auto row = view.target_row(i);
  Emission emission;
  const uint64_t target = mul_high(bits, statistics.mass);
  emission.token = pick(group, row.n, token_mass(row, statistics, view.filter, head), target);
  emission.logprob = log_probability(row[emission.token], statistics, view.filter, head);
  emission.statistics = statistics;
  return emission;
}

// A residual's masses, added up, and where a token is `wanted` the one that `bits` draw from them;
// -1 where there is no mass.
struct Drawn {
  uint64_t total;
  int64_t token;
};

// Collective; one sum over the group. (A backend may overload it for its groups.)
template <class Group, class Weight>
POLYSPEC_FN Drawn draw_residual(Group& group, const Weight& weight, bool wanted, uint64_t bits) {
  const int64_t n = weight.p.row.n;
  const uint64_t total = sum_tiles(group, n, weight);
  if (!wanted || total == 0) return {total, -1};
  return {total, pick(group, n, weight, mul_high(bits, total))};
}

// Whether the tile sums of the target's row that a walk ends at are in the group's scratch.
template <class Group>
POLYSPEC_FN constexpr bool has_sums(const Group&, int64_t) {
  return true;
}

// A token drawn from the residual by rejection: teams try at once, and the first try in their order
// that succeeds counts, so that it does not matter how many teams there are. -1 if none does. Needs
// p's tile sums in scratch. Collective.
template <class Group, class Weight>
POLYSPEC_FN int64_t try_residual(Group& group, const Draws& draws, int64_t offset,
                                 const Weight& weight, uint64_t mass) {
  int64_t found = INT64_MAX;  // try and token
  POLYSPEC_ROLLED
  for (int64_t j = group.team(); j < kResidualTries && found == INT64_MAX; j += group.teams()) {
    const uint64_t target = mul_high(draws.of_try(offset, j, 0), mass);
    const int64_t token = team_pick(group, weight.p.row.n, weight.p, target);
    if (weight.keeps(token, open_unit(draws.of_try(offset, j, 1)))) found = j << 32 | token;
  }
  found = group.min(found);
  return found == INT64_MAX ? -1 : found & 0xffffffff;
}

// Draws the correction, the token `offset` after the call's position, from a row's residual.
// `summed`: p's tile sums are in scratch. Where nothing is left p and q are equal up to rounding
// and p itself is drawn from, with a note. Collective.
template <class Group, class View, class Weight>
POLYSPEC_FN Emission emit_correction(Group& group, const View& view, int64_t offset,
                                     const Weight& weight, bool summed,
                                     const RowStatistics& p_statistics, uint64_t bits,
                                     int32_t* status) {
  const auto p = weight.p;
  const auto row = p.row;
  Emission emission;
  if (view.draws.tries()) {
    if (!summed) sum_tiles(group, row.n, p);
    emission.token = try_residual(group, view.draws, offset, weight, p_statistics.mass);
  }
  if (emission.token < 0) emission.token = draw_residual(group, weight, true, bits).token;
  if (emission.token < 0) {
    *status |= kStatusZeroResidual;
    sum_tiles(group, row.n, p);
    emission.token = pick(group, row.n, p, mul_high(bits, p_statistics.mass));
  }
  emission.logprob = log_probability(row[emission.token], p_statistics, view.filter, p.head);
  emission.statistics = p_statistics;
  return emission;
}

}  // namespace polyspec::POLYSPEC_CORE
