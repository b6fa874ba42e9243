// The rows of a batch's blocks, shared out among groups: each takes one row after the other, the
// first rows of all requests before the second rows, and the group that completes the rows that
// count of a request verifies it (known_rows.hpp).
//
// A request has a word of marks: a bit for each row that is recorded, and above these a bit for
// each row at which a walk ends. Only the rows up to the first end count, so the group that sets
// the bit that completes them verifies; rows after an end are skipped. No group waits for another,
// so the groups need not run at the same time. The last group to leave resets all words to zero for
// the next call.
#pragma once

#include "core/known_rows.hpp"
#include "cuda/launch_shape.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::POLYSPEC_CORE {

// The beginning of a workspace: zeros between calls.
struct RowTickets {
  uint64_t marks[polyspec::cuda::kMostRecords];  // by request
  unsigned taken;                                // rows, without the first of each group
  unsigned left;                                 // groups that are through
};

__device__ __forceinline__ uint64_t add_marks(uint64_t* marks, uint64_t more) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(marks), more);
}
__device__ __forceinline__ uint64_t marks_of(int64_t row, bool ends) {
  return uint64_t{1} << row | static_cast<uint64_t>(ends) << (row + polyspec::cuda::kMarkedRows);
}
__device__ __forceinline__ bool completed(uint64_t marks) {
  const uint64_t ends = marks >> polyspec::cuda::kMarkedRows;
  const uint64_t first = ends & (~ends + 1);
  const uint64_t counting = first | (first - 1);  // the rows up to it
  return ends != 0 && (marks & counting) == counting;
}

// The next row, counted as `rows_of_batch` are, that a group may still need; their number if there
// is none. By one thread.
__device__ __forceinline__ int64_t next_row(RowTickets* tickets, int64_t groups, int64_t batch,
                                            int64_t rows_of_batch) {
  while (groups < rows_of_batch) {
    const int64_t row = groups + atomicAdd(&tickets->taken, 1u);
    if (row >= rows_of_batch) break;
    const uint64_t marks = add_marks(&tickets->marks[row % batch], 0);
    const uint64_t before = (uint64_t{1} << row / batch) - 1;
    if ((marks >> polyspec::cuda::kMarkedRows & before) == 0) return row;
  }
  return rows_of_batch;
}

// The share of group number `index` of `groups` in a batch. records: [b, k+1]. Collective.
template <class T, Requests kind, class Rules, class Group>
__device__ __forceinline__ void verify_rows(Group& group, const VerifyParams& params, int64_t index,
                                            int64_t groups, RowTickets* tickets,
                                            RowRecord* records) {
  const int64_t rows = params.draft_len + 1;
  const int64_t all = params.batch * rows;
  POLYSPEC_ROLLED
  for (int64_t row = index; row < all;) {
    const int64_t request = row % params.batch;
    const int64_t i = row / params.batch;
    RowRecord* const recorded = records + request * rows;
    const bool ends = record_row<T, kind, Rules>(group, params, request, i, &recorded[i]);
    uint64_t told = 0;  // the next row, and whether this one completes the request
    if (group.rank() == 0) {
      __threadfence();  // the record is visible to a group that sees the mark
      const uint64_t mine = marks_of(i, ends);
      const uint64_t before = add_marks(&tickets->marks[request], mine);
      __threadfence();  // and other groups' records are seen after their marks
      const bool last = !completed(before) && completed(before | mine);
      told = static_cast<uint64_t>(next_row(tickets, groups, params.batch, all)) << 1 |
             static_cast<uint64_t>(last);
    }
    told = group.sum(told);
    row = static_cast<int64_t>(told >> 1);
    if ((told & 1) == 0) continue;
    KnownRows<Group> known(group, recorded, i);
    verify_request<T, kind, Rules>(known, params, request);
    group.sync();  // it goes on in separate buffers
  }
  if (group.rank() != 0) return;
  __threadfence();  // all marks are set, and read
  const unsigned others = static_cast<unsigned>(groups - 1);
  if (atomicInc(&tickets->left, others) != others) return;
  __threadfence();
  for (int64_t request = 0; request < params.batch; ++request) tickets->marks[request] = 0;
  tickets->taken = 0;
}

}  // namespace polyspec::POLYSPEC_CORE
