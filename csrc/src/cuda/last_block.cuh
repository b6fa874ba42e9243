// One row per group, and the group that comes last verifies the block (known_rows.hpp).
//
// The groups of a request count themselves with an atomic ticket. Whoever draws the last one knows
// that all rows are recorded and walks the block; the same addition puts the ticket back to zero
// for the next call. Nobody waits for anybody, so the groups need not run at the same time, and
// nothing has to be cleared between calls.
#pragma once

#include "core/known_rows.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

// Row i of a request, and the request itself when the other rows are done. records: [k+1];
// *ticket: 0 before the first row of a call begins, and again after the last. Collective.
template <class T, class Group>
__device__ __forceinline__ void verify_row(Group& group, const VerifyParams& params,
                                           int64_t request, int64_t i, RowRecord* records,
                                           unsigned* ticket) {
  record_row<T>(group, params, request, i, &records[i]);
  uint64_t last = 0;
  if (group.rank() == 0) {
    __threadfence();  // the record is seen by whoever sees the ticket taken
    const unsigned others = static_cast<unsigned>(params.draft_len);
    last = atomicInc(ticket, others) == others ? 1 : 0;  // which follows `others` with 0
    __threadfence();  // and what others recorded is seen after their tickets
  }
  if (group.sum(last) == 0) return;
  KnownRows<Group> known(group, records);
  verify_request<T>(known, params, request);
}

}  // namespace polyspec::POLYSPEC_CORE
