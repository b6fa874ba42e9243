// Barriers of a cluster that a row of logits takes, counted while the kernels run on the simulated
// device, against budgets. Finding the token of a draw takes none.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda_runtime_api.h"
#include "polyspec/verify_tree.hpp"
#include "support/check.hpp"

namespace {

using polyspec::DType;
using polyspec::RowStatistics;

constexpr int64_t kVocab = 9000;
constexpr int64_t kDrafted = 4;
constexpr uint64_t kLaunch = 2;  // where a kernel begins and where it ends

// Rows of normal logits.
std::vector<float> random_rows(int64_t rows) {
  std::vector<float> logits(static_cast<size_t>(rows * kVocab));
  uint64_t state = 1;
  for (float& z : logits) {
    float sum = 0.0f;
    for (int i = 0; i < 6; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<float>(state >> 40) * 0x1p-24f;
    }
    z = 4.0f * (sum - 3.0f);
  }
  return logits;
}

std::vector<uint16_t> bfloat16(const std::vector<float>& values) {
  std::vector<uint16_t> halves(2 * values.size());
  std::memcpy(halves.data(), values.data(), 4 * values.size());
  for (size_t i = 0; i < values.size(); ++i) halves[i] = halves[2 * i + 1];
  return halves;
}

template <class Run>
uint64_t cluster_barriers(const Run& run) {
  const uint64_t before = stand_in::barriers_passed().of_clusters;
  const polyspec::Result result = run();
  CHECK_EQ(std::string(), result.message);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return stand_in::barriers_passed().of_clusters - before;
}

// A sample of each row.
struct Sampled {
  explicit Sampled(int64_t rows)
      : tokens(static_cast<size_t>(rows)),
        logprobs(static_cast<size_t>(rows)),
        status(static_cast<size_t>(rows), -1),
        statistics(static_cast<size_t>(rows)) {
    params.batch = rows;
    params.vocab = params.logits_stride = kVocab;
    params.tokens = tokens.data();
    params.logprobs = logprobs.data();
    params.status = status.data();
    params.statistics = statistics.data();
  }
  uint64_t run() {
    const auto on_device = [&] { return polyspec::sample(params, polyspec::Stream::on(nullptr)); };
    const uint64_t barriers = cluster_barriers(on_device);
    for (const int32_t each : status) CHECK_EQ(0, each);
    return barriers;
  }

  std::vector<int64_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> status;
  std::vector<RowStatistics> statistics;
  polyspec::SampleParams params;
};

struct Filters {
  const char* name;
  int64_t top_k;
  float top_p, min_p;
  uint64_t of_16_bits, of_32_bits;  // barriers
};

// The last two keep more tokens than fit a CTA of these tests.
constexpr Filters kFilters[] = {
    {"no filter", 0, 1.0f, 0.0f, 2, 2},
    {"top-k", 5, 1.0f, 0.0f, 3, 3},
    {"top-k and top-p", 5, 0.9f, 0.0f, 3, 3},
    {"top-k, top-p and min-p", 5, 0.9f, 0.1f, 3, 3},
    {"min-p", 0, 1.0f, 0.4f, 3, 3},
    {"top-p", 0, 0.1f, 0.0f, 7, 7},
    {"top-p of many tokens", 0, 0.9f, 0.0f, 13, 16},
    {"top-k of many tokens", 500, 1.0f, 0.0f, 8, 11},
};

void check_rows(const Filters& filters, DType dtype, const void* logits, uint64_t budget) {
  Sampled sampled(1);
  sampled.params.logits = logits;
  sampled.params.dtype = dtype;
  sampled.params.sampling.top_k.value = filters.top_k;
  sampled.params.sampling.top_p.value = filters.top_p;
  sampled.params.sampling.min_p.value = filters.min_p;
  const uint64_t barriers = sampled.run() - kLaunch;
  std::printf("%s, %s: %d\n", filters.name, dtype == DType::kFloat32 ? "float32" : "bfloat16",
              static_cast<int>(barriers));
  CHECK_EQ(budget, barriers);
}

// A chain that is kept as a whole, since the draft's distributions are the target's. Where their
// statistics are not handed over the draft's rows take barriers as well.
void check_chain(const std::vector<float>& logits, const Filters& filters, bool handed_over) {
  Sampled drafted(kDrafted);
  drafted.params.logits = logits.data();
  drafted.params.sampling.top_k.value = filters.top_k;
  drafted.params.sampling.top_p.value = filters.top_p;
  drafted.params.sampling.min_p.value = filters.min_p;
  drafted.run();
  std::vector<int64_t> tokens(kDrafted + 1);
  std::vector<float> logprobs(kDrafted + 1);
  int64_t accepted = -1;
  int32_t status = -1;
  polyspec::VerifyParams params;
  params.batch = 1;
  params.draft_len = kDrafted;
  params.vocab = params.draft_vocab = kVocab;
  params.target_logits = params.draft_logits = logits.data();
  params.target_stride[1] = params.draft_stride[1] = kVocab;
  params.sampling = drafted.params.sampling;
  if (handed_over) params.draft_statistics = drafted.statistics.data();
  params.draft_tokens = drafted.tokens.data();
  params.draft_tokens_stride = kDrafted;
  params.tokens = tokens.data();
  params.logprobs = logprobs.data();
  params.num_accepted = &accepted;
  params.status = &status;
  const uint64_t barriers =
      cluster_barriers([&] { return polyspec::verify(params, polyspec::Stream::on(nullptr)); });
  CHECK_EQ(0, status);
  CHECK_EQ(kDrafted, accepted);
  const uint64_t rows = static_cast<uint64_t>(kDrafted + 1 + (handed_over ? 0 : kDrafted));
  CHECK_EQ(filters.of_32_bits * rows, barriers - kLaunch);
}

constexpr uint64_t kParents = 1;   // to check a tree's parents
constexpr uint64_t kTicket = 1;    // shows a group whether it is the last
constexpr uint64_t kChildren = 3;  // to check a row's, to find the first, to find the token's

// A tree of deterministic nodes: a walk takes its rows one after the other; at once, each group has
// one row, and the groups before the last take no more barriers.
void check_tree(const std::vector<float>& logits, bool at_once) {
  const std::vector<int64_t> drafted = {1, 2, 3, 4}, parents = {-1, 0, -1, 2};
  std::vector<int64_t> tokens(3), path(2), rows(3);
  std::vector<float> logprobs(3);
  int64_t accepted = -1;
  int32_t status = -1;
  void* workspace = nullptr;
  CHECK(cudaMalloc(&workspace, polyspec::kVerifyWorkspaceBytes) == cudaSuccess);
  const polyspec::Stream stream = polyspec::Stream::on(nullptr);
  CHECK(polyspec::clear_workspace(workspace, polyspec::kVerifyWorkspaceBytes, stream).ok());
  polyspec::VerifyTreeParams params;
  params.batch = 1;
  params.nodes = kDrafted;
  params.depth = 2;
  params.vocab = params.target_stride[1] = kVocab;
  params.target_logits = logits.data();
  params.draft_tokens = drafted.data();
  params.parents = parents.data();
  params.workspace = workspace;
  params.tokens = tokens.data();
  params.num_accepted = &accepted;
  params.path = path.data();
  params.rows = rows.data();
  params.logprobs = logprobs.data();
  params.status = &status;
  polyspec::cuda::force_shape(8, at_once ? 1 : 0);
  const uint64_t barriers = cluster_barriers([&] { return polyspec::verify_tree(params, stream); });
  CHECK(cudaFree(workspace) == cudaSuccess);
  CHECK_EQ(0, status);
  const uint64_t of_row = kFilters[0].of_32_bits + kChildren;
  const uint64_t walked = kLaunch + kParents + of_row * static_cast<uint64_t>(accepted + 1);
  const uint64_t of_group = kLaunch + kParents + of_row + kTicket;
  CHECK_EQ(at_once ? of_group * static_cast<uint64_t>(kDrafted + 1) : walked, barriers);
}

}  // namespace

int main() {
  polyspec::cuda::force_shape(8, 0);
  const std::vector<float> logits = random_rows(kDrafted + 1);
  const std::vector<uint16_t> narrow = bfloat16(logits);
  for (const Filters& filters : kFilters) {
    check_rows(filters, DType::kBFloat16, narrow.data(), filters.of_16_bits);
    check_rows(filters, DType::kFloat32, logits.data(), filters.of_32_bits);
  }
  for (const bool handed_over : {true, false}) {
    check_chain(logits, kFilters[0], handed_over);
    check_chain(logits, kFilters[2], handed_over);
  }
  for (const bool at_once : {false, true}) check_tree(logits, at_once);
  return 0;
}
