// The rows of a block apart: each group computes the record of one row, and one more group, which
// then has all records that count, walks the block. For processors that have more groups than
// requests.
//
// The result is a RowRecord. KnownRows<Group> is a group that looks a row's distribution up where
// other groups reduce the row; the rules themselves (block_rules.hpp) are the same.
#pragma once

#include "core/verify_request.hpp"

namespace polyspec::POLYSPEC_CORE {

struct RowRecord {
  RowStatistics p;  // the target's distribution, and at temperature 0 its argmax
  RowStatistics q;  // the draft's distribution, if the proposal was drawn
  int64_t argmax;
  int32_t p_status;  // error bits or 0
  int32_t q_status;
};

// Whether a walk that comes to row i ends there.
template <class Rules, class T, Requests kind>
POLYSPEC_FN bool ends_at(const Block<T, kind>& block, int64_t i, const RowRecord& row) {
  if (i == block.length || row.p_status != 0) return true;
  if (block.filter.greedy()) return block.token(i) != row.argmax;
  double ratio = 0.0;
  int64_t y;
  if (ratio_at(block, i, row.p, row.q, row.q_status, &y, &ratio) != 0) return true;
  return !Rules::whole(block.params) && !(block.accept_draw(i) < ratio);
}

// Computes the record of row i of a request. Rank 0 writes the record; its thread has to release it
// to the readers. Returns to rank 0 whether no later row counts. Collective.
template <class T, Requests kind, class Rules, class Group>
POLYSPEC_FN bool record_row(Group& group, const VerifyParams& params, int64_t request, int64_t i,
                            RowRecord* record) {
  Block<T, kind> block(params, request);
  if (open_block(&block) != 0 || block.room == 0 || i >= block.rows) return true;
  RowRecord found{{}, {0.0f, 0.0f, 1}, -1, 0, 0};
  if (block.filter.greedy()) {
    Emission emission;
    found.p_status = target_argmax(group, block, i, &emission);
    found.argmax = emission.token;
    found.p = emission.statistics;
  } else {
    const bool drawn = i < block.length && !block.deterministic(i);
    both_statistics(group, block, i, drawn, &found.p, &found.q, &found.p_status, &found.q_status);
  }
  if (group.rank() != 0) return false;
  *record = found;
  return ends_at<Rules>(block, i, found);
}

template <class Group>
class KnownRows : public Group {
 public:
  // `own`: the row that this group has recorded just now, with tile sums in scratch.
  POLYSPEC_FN KnownRows(const Group& group, const RowRecord* rows, int64_t own)
      : Group(group), rows_(rows), own_(own) {}
  POLYSPEC_FN const RowRecord& row(int64_t i) const { return rows_[i]; }
  POLYSPEC_FN bool has_sums_of(int64_t i) const { return i == own_; }
  POLYSPEC_FN void lose_sums() { own_ = -1; }

 private:
  const RowRecord* rows_;
  int64_t own_;
};

template <class Group>
POLYSPEC_FN bool has_sums(const KnownRows<Group>& group, int64_t i) {
  return group.has_sums_of(i);
}

template <class T, Requests kind, class Group>
POLYSPEC_FN void both_statistics(KnownRows<Group>& group, const Block<T, kind>&, int64_t i,
                                 bool drawn, RowStatistics* p, RowStatistics* q, int32_t* p_error,
                                 int32_t* q_error) {
  const RowRecord& record = group.row(i);
  *p = record.p;
  *p_error = record.p_status;
  *q_error = 0;
  if (!drawn) return;
  *q = record.q;
  *q_error = record.q_status;
}

template <class Group, class T, Requests kind>
POLYSPEC_FN Drawn draw_residual(KnownRows<Group>& group, const ResidualWeight<T, kind>& weight,
                                bool wanted, uint64_t bits) {
  group.lose_sums();
  return draw_residual(static_cast<Group&>(group), weight, wanted, bits);
}

template <class T, Requests kind, class Group>
POLYSPEC_FN int32_t target_argmax(KnownRows<Group>& group, const Block<T, kind>&, int64_t i,
                                  Emission* emission) {
  *emission = {group.row(i).argmax, 0.0f, group.row(i).p};
  return group.row(i).p_status;
}

// The tile sums of a row that others have recorded are not in this group's scratch.
template <class T, Requests kind, class Group>
POLYSPEC_FN Emission emit_from_row(KnownRows<Group>& group, const Block<T, kind>& block, int64_t i,
                                   const RowStatistics& statistics, uint64_t bits) {
  if (!group.has_sums_of(i)) {
    const Row<T> row = block.target_row(i);
    const auto weight = token_mass(row, statistics, block.filter, head_room(block.params.vocab));
    sum_tiles(group, row.n, weight);
  }
  return emit_from_row(static_cast<Group&>(group), block, i, statistics, bits);
}

}  // namespace polyspec::POLYSPEC_CORE
