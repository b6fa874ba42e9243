// Times of `verify` on a device by how it is launched: CTAs of a group times groups that share the
// rows out, 0 groups for walks, after the backend's choice. Not a test: launch_shape.hpp takes its
// choices from this output.
//
//   verify_shapes [vocabulary [draft tokens]]    128256 and 10; bfloat16 logits
#include <cstdio>

#ifdef POLYSPEC_WITH_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "cuda/launch.hpp"
#include "polyspec/verify.hpp"

namespace {

using polyspec::DType;
using polyspec::Stream;

constexpr int64_t kMostRequests = 64;
constexpr int kRepeats = 8, kWarmUp = 2;
constexpr size_t kFlushed = 256 << 20;  // more than caches hold
constexpr float kNoise = 0.55f;         // of the target's logits relative to the draft's
constexpr int kMultiprocessors = 132;

void ok(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void ok(const polyspec::Result& result) {
  if (!result.ok()) throw std::runtime_error(result.message);
}

template <class T>
T* on_device(size_t count) {
  void* memory = nullptr;
  ok(cudaMalloc(&memory, count * sizeof(T)));
  return static_cast<T*>(memory);
}

uint16_t bfloat16_of(float value) {
  polyspec::core::BFloat16 made;
  polyspec::core::convert_output(value, &made);
  return made.bits;
}

class Verifications {
 public:
  Verifications(int64_t vocab, int64_t draft_len) : v_(vocab), k_(draft_len) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> draft, target;
    for (int64_t i = 0; i < (k_ + 1) * v_; ++i) {
      const float logit = 3 * normal(random);
      if (i < k_ * v_) draft.push_back(bfloat16_of(logit));
      target.push_back(bfloat16_of(logit + kNoise * normal(random)));
    }
    for (int64_t i = 0; i < kMostRequests; ++i) {  // the same logits, other seeds
      copy(target, target_ + i * (k_ + 1) * v_);
      copy(draft, draft_ + i * k_ * v_);
    }
    std::vector<uint64_t> seeds;
    for (uint64_t i = 0; i < kMostRequests; ++i) seeds.push_back(1000 + 77 * i);
    copy(seeds, seeds_);
    ok(cudaStreamCreate(&stream_));
    ok(cudaEventCreate(&began_));
    ok(cudaEventCreate(&ended_));
    ok(polyspec::clear_workspace(workspace_, polyspec::kVerifyWorkspaceBytes, on_stream()));
  }

  void time(bool filtered, polyspec::Rule rule, int64_t batch) const {
    polyspec::SamplingParams sampling;
    if (filtered) {
      sampling.top_k.value = 50;
      sampling.top_p.value = 0.9f;
    }
    for (int64_t j = 0; j < k_; ++j) sample(sampling, j);
    std::printf("%s, %s, batch %lld:", rule == polyspec::Rule::kBlock ? "block" : "token",
                filtered ? "top-k, top-p" : "no filter", static_cast<long long>(batch));
    time(sampling, rule, batch, 0, -1);
    for (int ctas = 1; ctas <= 8; ctas *= 2) {
      for (const int groups : {0, 15, 30, 66, 132}) {
        if (groups * ctas <= kMultiprocessors) time(sampling, rule, batch, ctas, groups);
      }
    }
    std::printf("\n");
  }

 private:
  Stream on_stream() const { return Stream::on(stream_); }

  template <class T, class To>
  static void copy(const std::vector<T>& from, To* to) {
    ok(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

  void sample(const polyspec::SamplingParams& sampling, int64_t j) const {
    polyspec::SampleParams p;
    p.batch = kMostRequests;
    p.vocab = v_;
    p.dtype = DType::kBFloat16;
    p.logits = draft_ + j * v_;
    p.logits_stride = k_ * v_;
    p.sampling = sampling;
    p.draw.seed.data = seeds_;
    p.draw.position.value = j;
    p.draw.level = 2;
    p.tokens = ids_ + j;
    p.logprobs = logprobs_;
    p.status = status_;
    p.statistics = drawn_ + j;
    p.stride = p.statistics_stride = k_;
    ok(polyspec::sample(p, on_stream()));
  }

  // Prints the median microseconds after the shape.
  void time(const polyspec::SamplingParams& sampling, polyspec::Rule rule, int64_t batch, int ctas,
            int groups) const {
    polyspec::VerifyParams p;
    p.batch = batch;
    p.draft_len = k_;
    p.vocab = p.draft_vocab = v_;
    p.target_dtype = p.draft_dtype = DType::kBFloat16;
    p.target_logits = target_;
    p.target_stride[0] = (k_ + 1) * v_;
    p.draft_logits = draft_;
    p.draft_stride[0] = k_ * v_;
    p.target_stride[1] = p.draft_stride[1] = v_;
    p.draft_statistics = drawn_;
    p.draft_tokens = ids_;
    p.draft_tokens_stride = k_;
    p.sampling = sampling;
    p.draw.seed.data = seeds_;
    p.rule = rule;
    p.tokens = tokens_;
    p.num_accepted = accepted_;
    p.logprobs = logprobs_;
    p.status = status_;
    p.statistics = statistics_;
    p.workspace = workspace_;
    polyspec::cuda::force_shape(ctas, groups);
    std::vector<float> times;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      ok(cudaMemsetAsync(flushed_, repeat, kFlushed, stream_));
      ok(cudaEventRecord(began_, stream_));
      ok(polyspec::verify(p, on_stream()));
      ok(cudaEventRecord(ended_, stream_));
      ok(cudaEventSynchronize(ended_));
      float milliseconds = 0;
      ok(cudaEventElapsedTime(&milliseconds, began_, ended_));
      if (repeat >= kWarmUp) times.push_back(1000 * milliseconds);
    }
    std::sort(times.begin(), times.end());
    const std::string shape =
        ctas == 0 ? "chosen" : std::to_string(ctas) + "x" + std::to_string(groups);
    std::printf(" %s %.0f", shape.c_str(), times[times.size() / 2]);
  }

  int64_t v_, k_;
  size_t rows_ = static_cast<size_t>(kMostRequests * (k_ + 1));
  uint16_t* target_ = on_device<uint16_t>(rows_ * static_cast<size_t>(v_));
  uint16_t* draft_ = on_device<uint16_t>(rows_ * static_cast<size_t>(v_));
  unsigned char* workspace_ = on_device<unsigned char>(polyspec::kVerifyWorkspaceBytes);
  unsigned char* flushed_ = on_device<unsigned char>(kFlushed);
  int64_t *ids_ = on_device<int64_t>(rows_), *tokens_ = on_device<int64_t>(rows_);
  int64_t* accepted_ = on_device<int64_t>(kMostRequests);
  float* logprobs_ = on_device<float>(rows_);
  int32_t* status_ = on_device<int32_t>(rows_);
  polyspec::RowStatistics* drawn_ = on_device<polyspec::RowStatistics>(rows_);
  polyspec::RowStatistics* statistics_ = on_device<polyspec::RowStatistics>(rows_);
  uint64_t* seeds_ = on_device<uint64_t>(kMostRequests);
  cudaStream_t stream_ = nullptr;
  cudaEvent_t began_ = nullptr, ended_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  if (!polyspec::cuda::available()) {
    std::printf("skipped: no CUDA device that these kernels run on\n");
    return 77;
  }
  const Verifications verifications(argc > 1 ? std::strtoll(argv[1], nullptr, 10) : 128256,
                                    argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 10);
  for (const bool filtered : {false, true}) {
    for (const polyspec::Rule rule : {polyspec::Rule::kToken, polyspec::Rule::kBlock}) {
      for (const int64_t batch : {1, 2, 4, 8, 12, 16, 64})
        verifications.time(filtered, rule, batch);
    }
  }
  return 0;
}

#else

int main() {
  std::printf("skipped: built without CUDA kernels\n");
  return 77;
}

#endif
