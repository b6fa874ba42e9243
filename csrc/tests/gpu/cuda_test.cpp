// The CUDA backend against the CPU backend: the same calls over copies of the same memory, equal in
// every byte of the poisoned outputs. Skipped (77) without kernels or without a device that runs
// them.
#include <cstdio>
#include <cstdlib>

#include "cuda/launch.hpp"
#include "support/check.hpp"
#include "support/random_indexed.hpp"
#include "support/random_indexed_tree.hpp"
#include "support/random_schedule.hpp"

#ifdef POLYSPEC_WITH_CUDA
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <vector>

namespace {

#define CUDA_OK(call) CHECK_EQ(std::string("no error"), cudaGetErrorString(call))

using cases::RowStatistics;
using polyspec::Result;
using polyspec::Stream;

Result run(const polyspec::SampleParams& params, Stream stream) {
  return polyspec::sample(params, stream);
}
Result run(const polyspec::VerifyParams& params, Stream stream) {
  return polyspec::verify(params, stream);
}
Result run(const polyspec::VerifyTreeParams& params, Stream stream) {
  return polyspec::verify_tree(params, stream);
}
Result run(const polyspec::ScheduleNextParams& params, Stream stream) {
  return polyspec::schedule_next(params, stream);
}
Result run(const polyspec::ScheduleReportParams& params, Stream stream) {
  return polyspec::schedule_report(params, stream);
}

// Bytes on the device, freed at the end of the scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(const std::vector<unsigned char>& bytes) : size_(bytes.size()) {
    CUDA_OK(cudaMalloc(&data_, size_));
    CUDA_OK(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }
  std::vector<unsigned char> read() const {
    std::vector<unsigned char> bytes(size_);
    CUDA_OK(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

// Zeroed once, then used by call after call of one stream.
unsigned char* workspace(cudaStream_t stream) {
  static std::map<cudaStream_t, std::unique_ptr<DeviceBytes>> all;
  std::unique_ptr<DeviceBytes>& mine = all[stream];
  if (mine == nullptr) {
    mine = std::make_unique<DeviceBytes>(
        std::vector<unsigned char>(polyspec::kVerifyWorkspaceBytes, 0xa5));
    CHECK(
        polyspec::clear_workspace(mine->data(), polyspec::kVerifyWorkspaceBytes, Stream::on(stream))
            .ok());
  }
  return mine->data();
}

template <class Params>
Params with_workspace(const Params& params, cudaStream_t) {
  return params;
}
polyspec::VerifyParams with_workspace(polyspec::VerifyParams params, cudaStream_t stream) {
  params.workspace = workspace(stream);
  return params;
}

template <class Case>
void compare(uint64_t seed, int64_t forced_vocab, cudaStream_t stream, const std::string& kind) {
  const Case call(seed, forced_vocab);
  std::vector<unsigned char> expected = call.outputs.bytes;
  CHECK(run(call.params(call.inputs.bytes.data(), expected.data()), Stream::cpu()).ok());
  const DeviceBytes inputs(call.inputs.bytes);
  const DeviceBytes outputs(call.outputs.bytes);
  const Result result =
      run(with_workspace(call.params(inputs.data(), outputs.data()), stream), Stream::on(stream));
  CHECK_EQ(std::string(""), result.message);
  CUDA_OK(cudaStreamSynchronize(stream));
  const std::string name = kind + " case " + std::to_string(seed);
  cases::check_same(expected, outputs.read(), name);
  cases::check_same(call.inputs.bytes, inputs.read(), name + ", inputs");
}

// A captured call reads its inputs when it is replayed, not when it was captured.
template <class Case>
void test_graph(cudaStream_t stream, uint64_t seed, int64_t vocab) {
  const Case call(seed, vocab);
  std::vector<unsigned char> expected = call.outputs.bytes;
  CHECK(run(call.params(call.inputs.bytes.data(), expected.data()), Stream::cpu()).ok());
  const DeviceBytes inputs(std::vector<unsigned char>(call.inputs.bytes.size(), 0));
  const DeviceBytes outputs(call.outputs.bytes);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  const auto params = with_workspace(call.params(inputs.data(), outputs.data()), stream);
  CHECK(!polyspec::is_capturing(Stream::on(stream)));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(polyspec::is_capturing(Stream::on(stream)));
  CHECK(run(params, Stream::on(stream)).ok());
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_OK(cudaMemcpy(inputs.data(), call.inputs.bytes.data(), call.inputs.bytes.size(),
                     cudaMemcpyHostToDevice));
  for (int replay = 0; replay < 3; ++replay) {
    CUDA_OK(cudaMemcpy(outputs.data(), call.outputs.bytes.data(), call.outputs.bytes.size(),
                       cudaMemcpyHostToDevice));
    CUDA_OK(cudaGraphLaunch(executable, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    cases::check_same(expected, outputs.read(), "graph replay");
  }
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaGraphDestroy(graph));
}

// Calls on two streams at once do not disturb each other.
void test_two_streams(const cudaStream_t (&streams)[2]) {
  struct Running {
    explicit Running(uint64_t seed)
        : call(seed), expected(call.outputs.bytes), in(call.inputs.bytes), out(call.outputs.bytes) {
      CHECK(run(call.params(call.inputs.bytes.data(), expected.data()), Stream::cpu()).ok());
    }
    cases::VerifyCase call;
    std::vector<unsigned char> expected;
    DeviceBytes in, out;
  };
  std::vector<std::unique_ptr<Running>> all;
  for (uint64_t seed = 0; seed < 64; ++seed) all.push_back(std::make_unique<Running>(seed));
  for (const cudaStream_t stream : streams) workspace(stream);
  CUDA_OK(cudaDeviceSynchronize());
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto params = with_workspace(all[i]->call.params(all[i]->in.data(), all[i]->out.data()),
                                         streams[i % 2]);
      CHECK(run(params, Stream::on(streams[i % 2])).ok());
    }
  }
  CUDA_OK(cudaDeviceSynchronize());
  for (const auto& one : all) cases::check_same(one->expected, one->out.read(), "two streams");
}

// A launch that begins while the kernel before it runs still sees all that one writes: what is
// sampled is verified at once, against the distribution it was drawn from, so all of it stands.
void test_overlap(cudaStream_t stream) {
  constexpr int64_t kBatch = 64, kVocab = 40000;
  cases::Random random(5);
  std::vector<float> logits(kBatch * 2 * kVocab);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t i = 0; i < kVocab; ++i) {
      logits[static_cast<size_t>(2 * b * kVocab + i)] = random.normal();
      logits[static_cast<size_t>((2 * b + 1) * kVocab + i)] = 0.0f;
    }
  }
  cases::Block block;
  const size_t at = block.put(logits);
  const DeviceBytes in(block.bytes);
  cases::Block results;
  const size_t drafted = results.reserve<int64_t>(kBatch),
               statistics = results.reserve<RowStatistics>(kBatch);
  const size_t tokens = results.reserve<int64_t>(2 * kBatch);
  const size_t accepted = results.reserve<int64_t>(kBatch);
  const size_t logprobs = results.reserve<float>(2 * kBatch);
  const size_t status = results.reserve<int32_t>(kBatch);
  Stream overlapping = Stream::on(stream);
  overlapping.overlap = true;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const DeviceBytes out(results.bytes);
    polyspec::SampleParams s;
    s.batch = kBatch;
    s.vocab = kVocab;
    s.logits = in.data() + at;
    s.logits_stride = 2 * kVocab;
    s.draw.seed.value = seed;
    s.draw.level = 2;
    s.tokens = reinterpret_cast<int64_t*>(out.data() + drafted);
    s.logprobs = reinterpret_cast<float*>(out.data() + logprobs);
    s.status = reinterpret_cast<int32_t*>(out.data() + status);
    s.statistics = reinterpret_cast<RowStatistics*>(out.data() + statistics);
    polyspec::VerifyParams v;
    v.batch = kBatch;
    v.draft_len = 1;
    v.vocab = v.draft_vocab = kVocab;
    v.target_logits = v.draft_logits = s.logits;
    v.target_stride[0] = v.draft_stride[0] = 2 * kVocab;
    v.target_stride[1] = v.draft_stride[1] = kVocab;
    v.draft_statistics = s.statistics;
    v.draft_tokens = s.tokens;
    v.draft_tokens_stride = 1;
    v.draw.seed.value = seed;
    v.tokens = reinterpret_cast<int64_t*>(out.data() + tokens);
    v.num_accepted = reinterpret_cast<int64_t*>(out.data() + accepted);
    v.logprobs = s.logprobs;
    v.status = s.status;
    v.workspace = workspace(stream);
    CUDA_OK(cudaStreamSynchronize(stream));
    CHECK(run(s, overlapping).ok());
    CHECK(run(v, overlapping).ok());
    CUDA_OK(cudaStreamSynchronize(stream));
    const std::vector<unsigned char> got = out.read();
    for (int64_t b = 0; b < kBatch; ++b) {
      CHECK_EQ(0, reinterpret_cast<const int32_t*>(got.data() + status)[b]);
      CHECK_EQ(1, reinterpret_cast<const int64_t*>(got.data() + accepted)[b]);
      CHECK_EQ(reinterpret_cast<const int64_t*>(got.data() + drafted)[b],
               reinterpret_cast<const int64_t*>(got.data() + tokens)[2 * b]);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (!polyspec::cuda::available()) {
    std::printf("skipped: no CUDA device that these kernels run on\n");
    return 77;
  }
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400;
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreate(&stream));
  for (uint64_t seed = 0; seed < 2 * count; ++seed) {
    compare<cases::ScheduleNextCase>(seed, 0, streams[0], "schedule_next");
    compare<cases::ScheduleReportCase>(seed, 0, streams[0], "schedule_report");
  }
  test_graph<cases::ScheduleNextCase>(streams[0], 5, 0);
  test_graph<cases::ScheduleReportCase>(streams[0], 6, 0);
  // The backend's choice first; then walkers, and rows at once, in groups of every size.
  const int shapes[][2] = {{0, -1}, {1, 0}, {2, 0}, {4, 0}, {8, 0}, {1, 1}, {4, 1}, {8, 1}};
  for (const auto& [ctas, rows] : shapes) {
    polyspec::cuda::force_shape(ctas, rows);
    for (uint64_t seed = 0; seed < count; ++seed) {
      compare<cases::SampleCase>(seed, 0, streams[0], "sample");
      compare<cases::VerifyCase>(seed, 0, streams[0], "verify");
      compare<cases::IndexedVerifyCase>(seed, 0, streams[0], "indexed verify");
      compare<cases::TreeCase>(seed, 0, streams[0], "verify_tree");
      compare<cases::IndexedTreeCase>(seed, 0, streams[0], "indexed verify_tree");
    }
    for (const int64_t vocab : {int64_t{50257}, int64_t{128256}, int64_t{1050000}}) {
      for (uint64_t seed = 0; seed < 3; ++seed) {
        compare<cases::SampleCase>(seed, vocab, streams[0], "sample");
        compare<cases::VerifyCase>(seed, vocab, streams[0], "verify");
        compare<cases::TreeCase>(seed, vocab, streams[0], "verify_tree");
      }
    }
    test_graph<cases::SampleCase>(streams[0], 3, 1000);
    test_graph<cases::VerifyCase>(streams[0], 4, 50257);
    test_graph<cases::TreeCase>(streams[0], 4, 50257);
    test_two_streams(streams);
    test_overlap(streams[0]);
    std::printf("%d CTAs per group, rows at once %d (0 and -1: the backend chooses): passed\n",
                ctas, rows);
    std::fflush(stdout);
  }
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamDestroy(stream));
  return 0;
}

#else

int main() {
  CHECK(!polyspec::cuda::available());
  const cases::SampleCase call(0);
  std::vector<unsigned char> outputs = call.outputs.bytes;
  const polyspec::Result result = polyspec::sample(
      call.params(call.inputs.bytes.data(), outputs.data()), polyspec::Stream::on(nullptr));
  CHECK(result.code == polyspec::Result::Code::kUnsupported);
  CHECK(outputs == call.outputs.bytes);
  std::printf("skipped: built without CUDA kernels\n");
  return 77;
}

#endif
