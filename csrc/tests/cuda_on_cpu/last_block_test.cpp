// All rows of a block at once: CTAs of fibres record one row each and the last to arrive verifies
// the block, in several orders of execution; and a cluster that does the rows one after the other.
// The tickets serve call after call without being cleared.
#define POLYSPEC_CORE core_rows
#define POLYSPEC_FN inline

#include "cuda_on_cpu/fibre/compare.hpp"
#include "cuda_on_cpu/fibre/cuda_stand_in.hpp"
// Behind the stand-ins for what they use. clang-format off
#include "cuda/cluster_group.cuh"
#include "cuda/last_block.cuh"
#include "cuda/row_reader.cuh"
// clang-format on

namespace {

using namespace polyspec::core_rows;
using polyspec::DType;
using polyspec::VerifyParams;

constexpr int64_t kMostRows = 8, kMostRequests = 4;

struct Workspace {
  Workspace() { std::memset(records, 0xa5, sizeof records); }
  void check_clear() const {
    for (const unsigned ticket : tickets) CHECK_EQ(0u, ticket);
  }
  unsigned tickets[kMostRequests] = {};
  RowRecord records[kMostRequests][kMostRows];
};

template <class Group>
void row(Group& group, const VerifyParams& params, int64_t b, int64_t i, Workspace& workspace) {
  RowRecord* records = workspace.records[b];
  unsigned* ticket = &workspace.tickets[b];
  if (params.target_dtype == DType::kFloat32)
    verify_row<float>(group, params, b, i, records, ticket);
  if (params.target_dtype == DType::kBFloat16)
    verify_row<BFloat16>(group, params, b, i, records, ticket);
  if (params.target_dtype == DType::kFloat16)
    verify_row<Float16>(group, params, b, i, records, ticket);
}

// One CTA of `threads` per row, all at once.
template <class Case, int threads>
void test_ctas(uint64_t seed, Workspace& workspace) {
  const Expected<Case> expected(seed, 0, "verify");
  unsigned char unused[1];
  const auto& call = expected.call();
  const int rows = static_cast<int>(call.params(unused, unused).draft_len) + 1;
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine ctas(threads * rows, kWarp, order, seed, threads);
    stand_in::machine = &ctas;
    static CtaShared<threads> shared[kMostRows];
    std::memset(shared, 0xa5, sizeof shared);
    expected.check_run(ctas, [&](int rank, const VerifyParams& params) {
      CtaGroup<threads> group(shared[rank / threads]);
      for (int64_t b = 0; b < params.batch; ++b) row(group, params, b, rank / threads, workspace);
    });
    workspace.check_clear();
  }
}

// One cluster of two CTAs, which is each row's group in turn.
void test_cluster(uint64_t seed, Workspace& workspace) {
  constexpr int kThreads = 32;
  const Expected<cases::VerifyCase> expected(seed, 0, "verify");
  for (const fibre::Order order : fibre::kOrders) {
    fibre::Machine cluster(2 * kThreads, kWarp, order, seed, kThreads);
    static ClusterShared<kThreads> shared[2];
    stand_in::machine = &cluster;
    stand_in::shared_memory = reinterpret_cast<unsigned char*>(shared);
    stand_in::shared_size = sizeof shared[0];
    std::memset(shared, 0xa5, sizeof shared);
    expected.check_run(cluster, [&](int rank, const VerifyParams& params) {
      ClusterGroup<kThreads> group(shared[rank / kThreads]);
      for (int64_t b = 0; b < params.batch; ++b) {
        for (int64_t i = params.draft_len; i >= 0; --i) row(group, params, b, i, workspace);
      }
    });
    workspace.check_clear();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 50;
  Workspace workspace;
  for (uint64_t seed = 0; seed < count; ++seed) {
    test_ctas<cases::VerifyCase, 64>(seed, workspace);
    test_ctas<cases::IndexedVerifyCase, 64>(seed, workspace);
    test_cluster(seed, workspace);
  }
  return 0;
}
