// Chains with rows shared out among groups, and the numbers of groups and CTAs.
//
// Chains that are kept as a whole, the draft's distributions being the target's, by few groups and
// by many: the token after them is drawn from a row that a group may have recorded itself, before
// it summed residuals of others (the block rule). The same as on the CPU.
#include <string>
#include <vector>

#include "cuda/launch.hpp"
#include "cuda_runtime_api.h"
#include "polyspec/verify.hpp"
#include "support/check.hpp"

namespace {

constexpr int64_t kBatch = 3, kDrafted = 4, kVocab = 9000;
using polyspec::Stream;
const Stream kDevice = Stream::on(nullptr);

struct Verified {
  explicit Verified(size_t batch)
      : tokens(batch * (kDrafted + 1)),
        accepted(batch),
        logprobs(batch * (kDrafted + 1)),
        status(batch) {}
  std::vector<int64_t> tokens, accepted;
  std::vector<float> logprobs;
  std::vector<int32_t> status;
};

// Of every request the rows [kDrafted + 1, kVocab], multiples of 1/4.
std::vector<float> logits() {
  std::vector<float> made(kBatch * (kDrafted + 1) * kVocab);
  uint64_t state = 1;
  for (float& z : made) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    z = static_cast<float>(state >> 59) / 4.0f;
  }
  return made;
}

std::vector<int64_t> drafted(const std::vector<float>& rows) {
  std::vector<int64_t> tokens;
  for (int64_t b = 0; b < kBatch; ++b) {
    std::vector<int64_t> own(kDrafted);
    std::vector<float> logprobs(kDrafted);
    std::vector<int32_t> status(kDrafted);
    polyspec::SampleParams params;
    params.batch = kDrafted;
    params.vocab = params.logits_stride = kVocab;
    params.logits = rows.data() + b * (kDrafted + 1) * kVocab;
    params.draw.seed.value = static_cast<uint64_t>(b);
    params.tokens = own.data();
    params.logprobs = logprobs.data();
    params.status = status.data();
    CHECK(polyspec::sample(params, Stream::cpu()).ok());
    tokens.insert(tokens.end(), own.begin(), own.end());
  }
  return tokens;
}

Verified verified(polyspec::VerifyParams params, Stream stream) {
  Verified out(static_cast<size_t>(params.batch));
  params.tokens = out.tokens.data();
  params.num_accepted = out.accepted.data();
  params.logprobs = out.logprobs.data();
  params.status = out.status.data();
  const polyspec::Result result = polyspec::verify(params, stream);
  CHECK_EQ(std::string(), result.message);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return out;
}

template <class T>
std::vector<T> repeated(const T* values, int64_t count, int64_t times) {
  std::vector<T> all;
  for (int64_t i = 0; i < times; ++i) all.insert(all.end(), values, values + count);
  return all;
}

void check_kept_chains(polyspec::VerifyParams params) {
  params.batch = kBatch;
  for (const polyspec::Rule rule : {polyspec::Rule::kToken, polyspec::Rule::kBlock}) {
    params.rule = rule;
    const Verified expected = verified(params, Stream::cpu());
    for (const int groups : {1, 2, 4, 15}) {
      for (const int ctas : {1, 4}) {
        stand_in::seed(static_cast<uint64_t>(groups + 16 * ctas));
        polyspec::cuda::force_shape(ctas, groups);
        const Verified found = verified(params, kDevice);
        CHECK(found.accepted == std::vector<int64_t>(kBatch, kDrafted));
        CHECK(found.status == expected.status);
        CHECK(found.tokens == expected.tokens);
        CHECK(found.logprobs == expected.logprobs);
      }
    }
  }
  polyspec::cuda::force_shape(0, -1);
}

// 20 chains, all the same: 66 pairs of multiprocessors would share out 100 rows, but clusters of
// two run on 64 at the same time.
void check_groups(polyspec::VerifyParams params) {
  params.batch = 20;
  const auto rows = repeated(static_cast<const float*>(params.target_logits),
                             (kDrafted + 1) * kVocab, params.batch);
  const auto tokens = repeated(params.draft_tokens, kDrafted, params.batch);
  params.target_logits = params.draft_logits = rows.data();
  params.draft_tokens = tokens.data();
  const uint64_t before = stand_in::clusters_run(2);
  CHECK(verified(params, kDevice).accepted == std::vector<int64_t>(20, kDrafted));
  CHECK_EQ(64, static_cast<int>(stand_in::clusters_run(2) - before));
}

// 33 rows of a vocabulary for four CTAs each fill 132 multiprocessors, but only 32 clusters of four
// run at the same time: each has two.
void check_sampled_at_once(const std::vector<float>& rows) {
  constexpr int64_t kRequests = 33;
  std::vector<int64_t> tokens(kRequests);
  std::vector<float> logprobs(kRequests);
  std::vector<int32_t> status(kRequests, -1);
  polyspec::SampleParams params;
  params.batch = kRequests;
  params.vocab = 20000;
  const std::vector<float> all = repeated(rows.data(), params.vocab, kRequests);
  params.logits = all.data();
  params.tokens = tokens.data();
  params.logprobs = logprobs.data();
  params.status = status.data();
  const uint64_t before[] = {stand_in::clusters_run(2), stand_in::clusters_run(4)};
  CHECK(polyspec::sample(params, kDevice).ok());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(status == std::vector<int32_t>(kRequests, 0));
  CHECK_EQ(33, static_cast<int>(stand_in::clusters_run(2) - before[0]));
  CHECK_EQ(0, static_cast<int>(stand_in::clusters_run(4) - before[1]));
}

}  // namespace

int main() {
  const std::vector<float> rows = logits();
  const std::vector<int64_t> tokens = drafted(rows);
  polyspec::VerifyParams params;
  params.draft_len = kDrafted;
  params.vocab = params.draft_vocab = kVocab;
  params.target_logits = params.draft_logits = rows.data();
  for (int64_t* stride : {params.target_stride, params.draft_stride}) {
    stride[0] = (kDrafted + 1) * kVocab;
    stride[1] = kVocab;
  }
  params.draft_tokens = tokens.data();
  params.draft_tokens_stride = kDrafted;
  CHECK(cudaMalloc(&params.workspace, polyspec::kVerifyWorkspaceBytes) == cudaSuccess);
  CHECK(polyspec::clear_workspace(params.workspace, polyspec::kVerifyWorkspaceBytes, kDevice).ok());
  check_kept_chains(params);
  check_groups(params);
  check_sampled_at_once(rows);
  CHECK(cudaFree(params.workspace) == cudaSuccess);
  return 0;
}
