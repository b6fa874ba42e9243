// How many threads a CTA has, and how many CTAs a request gets. Host arithmetic without CUDA, so
// that a CTest reaches it.
#pragma once

#include <cstdint>

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

// Threads of a CTA. More warps hide more of a row's latency; these are the most that leave each
// thread the registers it wants, so that nothing spills: four schedulers share 65536 evenly.
constexpr int kSampleThreads = POLYSPEC_SAMPLE_THREADS;  // 168 registers
constexpr int kVerifyThreads = POLYSPEC_VERIFY_THREADS;  // 168, for the token rule
// 255, for what sums residuals: the block rule, trees.
constexpr int kResidualThreads = POLYSPEC_RESIDUAL_THREADS;

// Tokens that a CTA can keep in shared memory while it filters a row.
constexpr int kMaxCandidates = POLYSPEC_CANDIDATES;

// The largest cluster that every device with clusters runs.
constexpr int kMaxClusterCtas = POLYSPEC_CLUSTER_CTAS;
// Below this many tokens per CTA a barrier more costs as much as the tokens do.
constexpr int64_t kLeastTokens = 4096;

// The workspace: a ticket per request, then the row records.
constexpr int64_t kMostRecords = 1024;
constexpr int64_t kTicketBytes = 4 * kMostRecords;

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

// Whether a verification's rows, the last included, are worth reducing all at once: each then has
// groups of its own, but the rows after a rejection are read in vain and whoever verifies has a
// row's CTAs only. With clusters the walk is fast too; without them a walk has one multiprocessor.
inline bool rows_at_once(int64_t batch, int64_t rows, int64_t vocab, int multiprocessors,
                         bool clusters) {
  if (rows < 2 || batch > kMostRecords || batch * rows > kMostRecords) return false;
  return vocab >= 2 * kLeastTokens && (clusters ? 4 : 1) * batch * rows <= multiprocessors;
}

// The same of trees, whose rows are one more than their nodes. All of them have to find a
// multiprocessor at the same time, and each is then read by fewer than if a group walked: that one
// goes half as deep as the tree is, one row after the other.
inline bool tree_rows_at_once(int64_t batch, int64_t rows, int64_t depth, int64_t vocab,
                              int multiprocessors, bool clusters) {
  if (rows < 2 || batch > kMostRecords || rows > kMostRecords) return false;
  const int64_t groups = batch * rows;
  if (groups > kMostRecords || groups > multiprocessors || vocab < 2 * kLeastTokens) return false;
  const int of_walk = clusters ? ctas_per_group(batch, vocab, multiprocessors) : 1;
  const int of_row = clusters ? ctas_per_group(groups, vocab, multiprocessors) : 1;
  return 2 * of_walk <= (depth + 2) * of_row;
}

}  // namespace polyspec::cuda
