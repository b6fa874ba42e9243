// How many threads a CTA has, how many CTAs a request gets, and which kernels do. Host arithmetic
// without CUDA, so that a CTest reaches it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/distribution.hpp"
#include "polyspec/sample.hpp"

// Results do not depend on these: a build may set others, as the tests on a CPU do.
#ifndef POLYSPEC_SAMPLE_THREADS
#define POLYSPEC_SAMPLE_THREADS 384
#endif
#ifndef POLYSPEC_VERIFY_THREADS
#define POLYSPEC_VERIFY_THREADS 384
#endif
#ifndef POLYSPEC_RESIDUAL_THREADS
#define POLYSPEC_RESIDUAL_THREADS 256
#endif
#ifndef POLYSPEC_CLUSTER_CTAS
#define POLYSPEC_CLUSTER_CTAS 8
#endif
#ifndef POLYSPEC_CANDIDATES
#define POLYSPEC_CANDIDATES 2048
#endif

namespace polyspec::cuda {

using core::Requests;

// Threads of a CTA. More warps hide more of a row's latency; these are the most that leave each
// thread the registers it wants, so that nothing spills: four schedulers share 65536 evenly.
constexpr int kSampleThreads = POLYSPEC_SAMPLE_THREADS;  // 168 registers
constexpr int kVerifyThreads = POLYSPEC_VERIFY_THREADS;  // 168, for the token rule
// 255, for kernels that sum residuals: the block rule, trees.
constexpr int kResidualThreads = POLYSPEC_RESIDUAL_THREADS;

// Tokens that a CTA can keep in shared memory while it filters a row.
constexpr int kMaxCandidates = POLYSPEC_CANDIDATES;

// The largest cluster that every device with clusters runs.
constexpr int kMaxClusterCtas = POLYSPEC_CLUSTER_CTAS;
// Below this many tokens per CTA a barrier more costs as much as the tokens do.
constexpr int64_t kLeastTokens = 4096;

// The workspace: tickets, for each request and of the call, then the row records.
constexpr int64_t kMostRecords = 3072;
constexpr int64_t kTicketBytes = 8 * kMostRecords + 16;
// Rows of a block that a request's marks have room for.
constexpr int64_t kMarkedRows = 32;

// CTAs per group, a power of two: as many as leave every multiprocessor at most one CTA, so that a
// small batch spreads its rows over the chip and a large one gets one CTA per request, which walks
// and stops at the first rejection.
inline int ctas_per_group(int64_t groups, int64_t vocab, int multiprocessors) {
  int ctas = 1;
  while (ctas < kMaxClusterCtas && 2 * ctas * groups <= multiprocessors &&
         vocab >= 2 * ctas * kLeastTokens) {
    ctas *= 2;
  }
  return ctas;
}

// Whether a workspace has room for so many rows of each request.
inline bool has_room(int64_t batch, int64_t rows) {
  return batch <= kMostRecords && rows <= kMostRecords && batch * rows <= kMostRecords;
}

// How many groups share the rows of a verification out, the last row of a block included; 0: each
// request has a group that walks. A walk takes its rows one after the other, and the call waits for
// the longest walk; shared rows end together, but some are read in vain after a rejection, and each
// takes a ticket.
struct RowGroups {
  int64_t groups;
  int ctas;  // of each
};
// From times of every shape on an H200 (docs/gpu.md): groups of up to 4 CTAs are faster in two
// waves than half as large in one; residual masses of whole rows, `residuals`, are summed by the
// last group of each request, one row after the other, so that larger groups are faster in any
// case.
inline RowGroups row_groups(int64_t batch, int64_t rows, int64_t vocab, int multiprocessors,
                            bool clusters, bool residuals) {
  if (rows < 2 || rows > kMarkedRows || !has_room(batch, rows) || vocab < 2 * kLeastTokens)
    return {0, 1};
  const int64_t all = batch * rows;
  int ctas = 1;
  if (clusters) {
    ctas = ctas_per_group(residuals ? 2 * batch : all, vocab, multiprocessors);
    if (ctas < 4 && !residuals && ctas * all <= multiprocessors && vocab >= 2 * ctas * kLeastTokens)
      ctas *= 2;
  }
  const int64_t fitting = multiprocessors / ctas;
  return {all < fitting ? all : fitting, ctas};
}

// Whether the rows of trees, which are one more than their nodes, are read all at once. All of them
// have to find a multiprocessor at the same time, and each is then read by fewer than if a group
// walked: that one goes half as deep as the tree is, one row after the other.
inline bool tree_rows_at_once(int64_t batch, int64_t rows, int64_t depth, int64_t vocab,
                              int multiprocessors, bool clusters) {
  if (rows < 2 || !has_room(batch, rows)) return false;
  const int64_t groups = batch * rows;
  if (groups > multiprocessors || vocab < 2 * kLeastTokens) return false;
  const int of_walk = clusters ? ctas_per_group(batch, vocab, multiprocessors) : 1;
  const int of_row = clusters ? ctas_per_group(groups, vocab, multiprocessors) : 1;
  return 2 * of_walk <= (depth + 2) * of_row;
}

// Queries of a CTA of attention: kernels for few and for many, and the least that it pays to have.
constexpr int kFewQueries = 16, kManyQueries = 64, kLeastQueries = 4;
// Of these, for heads of a width: wide queries take more of the shared memory.
constexpr int most_queries(int most, int64_t width) {
  return most > kFewQueries && width > 128 ? most / 2 : most;
}
// How many of the queries that read the same keys a CTA takes: all, so that keys are read once, but
// for `most` of them; fewer while multiprocessors would have no CTA. `tasks`: sets of keys.
inline int64_t queries_of_cta(int64_t queries, int64_t tasks, int64_t most,
                              int64_t multiprocessors) {
  const int64_t parts = std::min(std::max((queries + most - 1) / most, multiprocessors / tasks),
                                 (queries + kLeastQueries - 1) / kLeastQueries);
  return (queries + parts - 1) / parts;
}

// The kind of a call's requests, by its values on the host. `typed`: draft rows have the target's
// type.
inline Requests requests_of(const SamplingParams& sampling, bool typed) {
  const auto all = [](const auto& parameter, auto value) {
    return parameter.data == nullptr && parameter.value == value;
  };
  if (!all(sampling.top_k, 0) || !all(sampling.top_p, 1.0f) || !all(sampling.min_p, 0.0f))
    return Requests::kAny;
  if (all(sampling.temperature, 0.0f)) return Requests::kGreedy;
  return typed ? Requests::kUnfiltered : Requests::kAny;
}

}  // namespace polyspec::cuda
