// All rows of a block at once: groups find out about one row each, and one more group, which then
// knows them all, walks the block. For few requests on a large processor.
//
// What is found out is a RowRecord. KnownRows<Group> is a group that looks a row's distribution up
// where another would reduce the row; the rules themselves (block_rules.hpp) are
// the same.
#pragma once

#include "core/verify_request.hpp"

namespace polyspec::POLYSPEC_CORE {

struct RowRecord {
  RowStatistics p;  // the target's distribution, and at temperature 0 its argmax
  RowStatistics q;  // the draft's distribution, where it was not handed over
  int64_t argmax;
  int32_t p_status;  // error bits or 0
  int32_t q_status;
};

// Finds out about row i of a request. Rank 0 writes the record; its thread has to release it to
// those who read it. Collective.
template <class T, class Group>
POLYSPEC_FN void record_row(Group& group, const VerifyParams& params, int64_t request, int64_t i,
                            RowRecord* record) {
  Block<T> block(params, request);
  if (open_block(&block) != 0 || block.room == 0 || i > block.length) return;
  RowRecord found{{}, {0.0f, 0.0f, 1}, -1, 0, 0};
  if (block.filter.greedy()) {
    Emission emission;
    found.p_status = target_argmax(group, block, i, &emission);
    found.argmax = emission.token;
    found.p = emission.statistics;
  } else {
    const bool drawn =
        i < block.length && !block.deterministic(i) && params.draft_statistics == nullptr;
    both_statistics(group, block, i, drawn, &found.p, &found.q, &found.p_status, &found.q_status);
  }
  if (group.rank() == 0) *record = found;
}

template <class Group>
class KnownRows : public Group {
 public:
  POLYSPEC_FN KnownRows(const Group& group, const RowRecord* rows) : Group(group), rows_(rows) {}
  POLYSPEC_FN const RowRecord& row(int64_t i) const { return rows_[i]; }

 private:
  const RowRecord* rows_;
};

template <class Group>
POLYSPEC_FN constexpr bool sums_rows(const KnownRows<Group>&) {
  return false;
}

template <class T, class Group>
POLYSPEC_FN void both_statistics(KnownRows<Group>& group, const Block<T>& block, int64_t i,
                                 bool drawn, RowStatistics* p, RowStatistics* q, int32_t* p_error,
                                 int32_t* q_error) {
  const RowRecord& record = group.row(i);
  *p = record.p;
  *p_error = record.p_status;
  *q_error = 0;
  if (!drawn) return;
  if (block.params.draft_statistics != nullptr) {
    *q_error = draft_statistics(static_cast<Group&>(group), block, i, q);
  } else {
    *q = record.q;
    *q_error = record.q_status;
  }
}

template <class Group, class T>
POLYSPEC_FN Drawn draw_residual(KnownRows<Group>& group, const ResidualWeight<T>& weight,
                                bool wanted, uint64_t bits) {
  return draw_residual(static_cast<Group&>(group), weight, wanted, bits);
}

template <class T, class Group>
POLYSPEC_FN int32_t target_argmax(KnownRows<Group>& group, const Block<T>&, int64_t i,
                                  Emission* emission) {
  *emission = {group.row(i).argmax, 0.0f, group.row(i).p};
  return group.row(i).p_status;
}

// The tile sums of a row that others have reduced are not in this group's scratch.
template <class T, class Group>
POLYSPEC_FN Emission emit_from_row(KnownRows<Group>& group, const Block<T>& block, int64_t i,
                                   const RowStatistics& statistics, uint64_t bits) {
  const Row<T> row = block.target_row(i);
  sum_tiles(group, row.n, token_mass(row, statistics, block.filter, head_room(block.params.vocab)));
  return emit_from_row(static_cast<Group&>(group), block, i, statistics, bits);
}

}  // namespace polyspec::POLYSPEC_CORE
