// What both verification rules are made of: the block's view of one request, acceptance and
// residual.
#pragma once

#include "core/request.hpp"
#include "polyspec/verify.hpp"

namespace polyspec::POLYSPEC_CORE {

// One request's block. Row i of target and draft verify draft token i.
template <class T>
struct Block {
  const VerifyParams& params;
  int64_t request;
  int64_t length;
  Filter filter;
  Draws draws;

  POLYSPEC_FN Row<T> target_row(int64_t i) const {
    return row_at<T>(params.target_logits,
                     request * params.target_stride[0] + i * params.target_stride[1], params.vocab);
  }
  POLYSPEC_FN AnyRow draft_row(int64_t i) const {
    return any_row_at(params.draft_logits, params.draft_dtype,
                      request * params.draft_stride[0] + i * params.draft_stride[1],
                      params.draft_vocab);
  }
  POLYSPEC_FN int64_t token(int64_t i) const {
    return params.draft_tokens[request * params.draft_tokens_stride + i];
  }
  POLYSPEC_FN bool deterministic() const { return params.draft_logits == nullptr; }
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
  // Fills the outputs behind the last emitted token; rank 0 only.
  POLYSPEC_FN void pad(int64_t from) const {
    for (int64_t i = from; i <= params.draft_len; ++i)
      write(i, -1, kNan, RowStatistics{0.0f, 0.0f, 0});
  }
};

// Draft id of a target token, -1 where the draft cannot propose it.
POLYSPEC_FN int64_t draft_id(const VerifyParams& params, int64_t token) {
  if (params.target_to_draft != nullptr) return params.target_to_draft[token];
  return token < params.draft_vocab ? token : -1;
}

// The target's distribution of row i, its tile sums left in scratch, and at temperature 0 its
// argmax; error bits or 0. Collective.
template <class T, class Group>
POLYSPEC_FN int32_t target_statistics(Group& group, const Block<T>& block, int64_t i,
                                      RowStatistics* statistics) {
  return row_statistics(group, block.target_row(i), block.filter, head_room(block.params.vocab),
                        statistics);
}
template <class T, class Group>
POLYSPEC_FN int32_t target_argmax(Group& group, const Block<T>& block, int64_t i,
                                  Emission* emission) {
  return greedy_emission(group, block.target_row(i), emission);
}

// The draft's distribution of row i: as handed over, or computed. Collective.
template <class T, class Group>
POLYSPEC_FN int32_t draft_statistics(Group& group, const Block<T>& block, int64_t i,
                                     RowStatistics* statistics) {
  const VerifyParams& params = block.params;
  if (params.draft_statistics != nullptr) {
    *statistics =
        params
            .draft_statistics[block.request * params.draft_len + i];  // acceptance_ratio checks it
    return 0;
  }
  const AnyRow row = block.draft_row(i);
  const int32_t error =
      row_statistics(group, row, block.filter, head_room(params.draft_vocab), statistics);
  return error == 0 ? 0 : (error | kStatusDraftRow);
}

// p(y)/q(y) for draft token y of row i, q = 1 for a deterministic proposal; error bits or 0. The
// quotient is exact up to double rounding, and exactly 1 for equal distributions.
template <class T>
POLYSPEC_FN int32_t acceptance_ratio(const Block<T>& block, int64_t i, int64_t y,
                                     const RowStatistics& p_statistics,
                                     const RowStatistics& q_statistics, double* ratio) {
  const VerifyParams& params = block.params;
  const auto p =
      token_mass(block.target_row(i), p_statistics, block.filter, head_room(params.vocab));
  const double p_mass = static_cast<double>(p(y));
  const double p_total = static_cast<double>(p_statistics.mass);
  if (block.deterministic()) {
    *ratio = p_mass / p_total;
    return 0;
  }
  const int64_t y_draft = draft_id(params, y);
  if (y_draft < 0 || y_draft >= params.draft_vocab) return kStatusDraftStatisticsMismatch;
  const int head = head_room(params.draft_vocab);
  const float z = block.draft_row(i)[y_draft];
  const uint64_t own = token_mass(block.draft_row(i), q_statistics, block.filter, head).of(z);
  if (!possible_statistics(q_statistics, block.filter, head, params.draft_vocab, z, own)) {
    return kStatusDraftStatisticsMismatch;
  }
  *ratio = (p_mass * static_cast<double>(q_statistics.mass)) / (static_cast<double>(own) * p_total);
  return 0;
}

// Integer masses of max(scale * p - q, 0) in units of 2^-(62 - head): the distribution drawn from
// after a rejection.
template <class T>
struct ResidualWeight {
  TokenMass<Row<T>> p;
  TokenMass<AnyRow> q;
  double p_scale;  // scale / total mass of p
  double q_scale;  // 1 / total mass of q
  double unit;
  const int32_t* target_to_draft;
  int64_t draft_vocab;
  int64_t proposed;  // deterministic proposal: q is one-hot here; else -1

  POLYSPEC_FN uint64_t operator()(int64_t i) const {
    double left = static_cast<double>(p(i)) * p_scale;
    if (proposed >= 0) {
      left -= i == proposed ? 1.0 : 0.0;
    } else {
      const int64_t j = target_to_draft != nullptr ? target_to_draft[i] : i;
      if (j >= 0 && j < draft_vocab) left -= static_cast<double>(q(j)) * q_scale;
    }
    return left > 0.0 ? static_cast<uint64_t>(static_cast<int64_t>(left * unit)) : 0;
  }
  // The same of a token whose two masses are at hand.
  POLYSPEC_FN uint64_t of(uint64_t p_mass, uint64_t q_mass) const {
    const double left =
        static_cast<double>(p_mass) * p_scale - static_cast<double>(q_mass) * q_scale;
    return left > 0.0 ? static_cast<uint64_t>(static_cast<int64_t>(left * unit)) : 0;
  }
};

template <class T>
POLYSPEC_FN ResidualWeight<T> residual_weight(const Block<T>& block, int64_t i,
                                              const RowStatistics& p_statistics,
                                              const RowStatistics& q_statistics, double scale) {
  const VerifyParams& params = block.params;
  const int head = head_room(params.vocab);
  ResidualWeight<T> weight{token_mass(block.target_row(i), p_statistics, block.filter, head),
                           {},
                           scale / static_cast<double>(p_statistics.mass),
                           0.0,
                           mass_unit(head),
                           params.target_to_draft,
                           params.draft_vocab,
                           block.token(i)};
  if (!block.deterministic()) {
    weight.q =
        token_mass(block.draft_row(i), q_statistics, block.filter, head_room(params.draft_vocab));
    weight.q_scale = 1.0 / static_cast<double>(q_statistics.mass);
    weight.proposed = -1;
  }
  return weight;
}

// Draws from a distribution whose tile sums are in scratch, as the last emitted token of the block.
// Collective.
template <class T, class Group>
POLYSPEC_FN Emission emit_from_row(Group& group, const Block<T>& block, int64_t i,
                                   const RowStatistics& statistics) {
  const int head = head_room(block.params.vocab);
  const Row<T> row = block.target_row(i);
  Emission emission;
  const uint64_t target = mul_high(block.emit_draw(i), statistics.mass);
  emission.token = pick(group, row.n, token_mass(row, statistics, block.filter, head), target);
  emission.logprob = log_probability(row[emission.token], statistics, block.filter, head);
  emission.statistics = statistics;
  return emission;
}

// Draws the correction of row i from norm(max(scale * p - q, 0)). Where that rounds to nothing p
// and q are equal up to rounding and p itself is drawn from, with a note. Collective.
template <class T, class Group>
POLYSPEC_FN Emission emit_from_residual(Group& group, const Block<T>& block, int64_t i,
                                        const RowStatistics& p_statistics,
                                        const RowStatistics& q_statistics, double scale,
                                        int32_t* status) {
  const ResidualWeight<T> weight = residual_weight(block, i, p_statistics, q_statistics, scale);
  const Row<T> row = block.target_row(i);
  const uint64_t total = sum_tiles(group, row.n, weight);
  if (total == 0) {
    *status |= kStatusZeroResidual;
    sum_tiles(group, row.n, weight.p);
    return emit_from_row(group, block, i, p_statistics);
  }
  Emission emission;
  emission.token = pick(group, row.n, weight, mul_high(block.emit_draw(i), total));
  emission.logprob =
      log_probability(row[emission.token], p_statistics, block.filter, weight.p.head);
  emission.statistics = p_statistics;
  return emission;
}

}  // namespace polyspec::POLYSPEC_CORE
