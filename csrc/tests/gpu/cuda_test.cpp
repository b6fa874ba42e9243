// The CUDA backend against the CPU backend: the same calls over copies of the same memory, equal in
// every byte of the poisoned outputs. Skipped (77) without kernels or without a device that runs
// them.
//
//   cuda_test [cases [vocabulary]]    other than 400 random cases of each kind, and the largest
//                                     vocabulary; with fewer than 64 cases all else is less, too
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cuda/launch.hpp"
#include "cuda/launch_shape.hpp"
#include "support/check.hpp"
#include "support/random_cache.hpp"
#include "support/random_indexed.hpp"
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
Result run(const polyspec::AppendParams& params, Stream stream) {
  return polyspec::append(params, stream);
}
Result run(const polyspec::PagedAppendParams& params, Stream stream) {
  return polyspec::append_paged(params, stream);
}
Result run(const polyspec::CompactTreeParams& params, Stream stream) {
  return polyspec::compact_tree(params, stream);
}
Result run(const polyspec::ScheduleDueParams& params, Stream stream) {
  return polyspec::schedule_due(params, stream);
}
Result run(const polyspec::ScheduleNextParams& params, Stream stream) {
  return polyspec::schedule_next(params, stream);
}
Result run(const polyspec::ScheduleReportParams& params, Stream stream) {
  return polyspec::schedule_report(params, stream);
}

Result run(const cases::PagesCase<true>::Params& params, Stream stream) {
  return polyspec::reserve_pages(params, stream);
}
Result run(const cases::PagesCase<false>::Params& params, Stream stream) {
  return polyspec::truncate_pages(params, stream);
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
  void write(const std::vector<unsigned char>& bytes) const {
    CHECK_EQ(size_, bytes.size());
    CUDA_OK(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice));
  }
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
polyspec::VerifyTreeParams with_workspace(polyspec::VerifyTreeParams params, cudaStream_t stream) {
  params.workspace = workspace(stream);
  return params;
}

// How a call is spread (force_shape).
struct Shape {
  int ctas, groups;  // 0, -1: the backend chooses
};

// The backend's choice first, and a group for each row; then walkers, and a few groups that share
// rows out, of every size.
std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes{{0, -1}, {1, 1 << 20}, {polyspec::cuda::kMaxClusterCtas, 1 << 20}};
  for (const int groups : {0, 3}) {
    for (int ctas = 1; ctas <= polyspec::cuda::kMaxClusterCtas; ctas *= 2)
      shapes.push_back({ctas, groups});
  }
  return shapes;
}

void force(const Shape& shape) { polyspec::cuda::force_shape(shape.ctas, shape.groups); }

std::string shown(const Shape& shape) {
  return std::to_string(shape.ctas) + " CTAs per group, groups " + std::to_string(shape.groups);
}

// A call on the device, and what the CPU backend makes of it.
template <class Case>
class Compared {
 public:
  Compared(uint64_t seed, cases::Extent extent, cudaStream_t stream, std::string name)
      : call_(seed, extent),
        name_(std::move(name) + " case " + std::to_string(seed)),
        expected_(call_.outputs.bytes),
        outputs_(call_.outputs.bytes),
        input_bytes_(cases::inputs_for(call_, outputs_.data())),
        inputs_(input_bytes_),
        stream_(stream) {
    const std::vector<unsigned char> in = cases::inputs_for(call_, expected_.data());
    CHECK(::run(call_.params(in.data(), expected_.data()), Stream::cpu()).ok());
  }

  auto params() const {
    return with_workspace(call_.params(inputs_.data(), outputs_.data()), stream_);
  }

  void run() const {
    const Result result = ::run(params(), Stream::on(stream_));
    CHECK_EQ(std::string(""), result.message);
  }

  void poison() const { outputs_.write(call_.outputs.bytes); }
  void check_outputs(const std::string& how) const {
    CUDA_OK(cudaStreamSynchronize(stream_));
    cases::check_same(expected_, outputs_.read(), name_ + how);
  }
  void check_inputs() const { cases::check_same(input_bytes_, inputs_.read(), name_ + ", inputs"); }

  // A captured call reads its inputs when it is replayed, not when it was captured.
  void check_graph() const {
    inputs_.write(std::vector<unsigned char>(input_bytes_.size(), 0));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    params();  // makes the workspace, which cannot be made in a capture
    CHECK(!polyspec::is_capturing(Stream::on(stream_)));
    CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    CHECK(polyspec::is_capturing(Stream::on(stream_)));
    run();
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));
    CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    inputs_.write(input_bytes_);
    for (int replay = 0; replay < 3; ++replay) {
      poison();
      CUDA_OK(cudaGraphLaunch(executable, stream_));
      check_outputs(", graph replay");
    }
    CUDA_OK(cudaGraphExecDestroy(executable));
    CUDA_OK(cudaGraphDestroy(graph));
  }

 private:
  Case call_;
  std::string name_;
  std::vector<unsigned char> expected_;
  DeviceBytes outputs_;
  std::vector<unsigned char> input_bytes_;
  DeviceBytes inputs_;
  cudaStream_t stream_;
};

// Runs one call in each of the shapes.
template <class Case>
void compare(uint64_t seed, cases::Extent extent, const std::vector<Shape>& shapes,
             cudaStream_t stream, const std::string& name) {
  const Compared<Case> call(seed, extent, stream, name);
  for (const Shape& shape : shapes) {
    force(shape);
    call.poison();
    call.run();
    call.check_outputs(", " + shown(shape));
  }
  call.check_inputs();
}

// compare for calls that have one shape.
template <class Case>
void compare(uint64_t seed, cudaStream_t stream, const std::string& name) {
  compare<Case>(seed, {}, {{0, -1}}, stream, name);
}

// Calls on two streams at once do not disturb each other.
class TwoStreams {
 public:
  TwoStreams(const cudaStream_t (&streams)[2], uint64_t calls) {
    for (uint64_t seed = 0; seed < calls; ++seed)
      calls_.push_back(std::make_unique<Compared<cases::VerifyCase>>(
          seed, cases::Extent(), streams[seed % 2], "two streams"));
  }
  void check(int repeats) const {
    for (const auto& call : calls_) {
      call->params();  // makes the workspace
      call->poison();
    }
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (const auto& call : calls_) call->run();
    }
    CUDA_OK(cudaDeviceSynchronize());
    for (const auto& call : calls_) call->check_outputs("");
  }

 private:
  std::vector<std::unique_ptr<Compared<cases::VerifyCase>>> calls_;
};

// A launch that begins while the kernel before it runs still sees all that one writes: what is
// sampled is verified at once, against the distribution it was drawn from, so all of it stands.
class Overlap {
 public:
  Overlap(int64_t batch, int64_t vocab, cudaStream_t stream)
      : batch_(batch), vocab_(vocab), stream_(stream), logits_(random_logits()) {
    drafted_ = results_.reserve<int64_t>(rows());
    statistics_ = results_.reserve<RowStatistics>(rows());
    tokens_ = results_.reserve<int64_t>(2 * rows());
    accepted_ = results_.reserve<int64_t>(rows());
    logprobs_ = results_.reserve<float>(2 * rows());
    status_ = results_.reserve<int32_t>(rows());
  }

  void check(uint64_t seed) const {
    Stream overlapping = Stream::on(stream_);
    overlapping.overlap = true;
    const DeviceBytes out(results_.bytes);
    polyspec::SampleParams s;
    s.batch = batch_;
    s.vocab = vocab_;
    s.logits = logits_.data();
    s.logits_stride = 2 * vocab_;
    s.draw.seed.value = seed;
    s.draw.level = 2;
    s.tokens = reinterpret_cast<int64_t*>(out.data() + drafted_);
    s.logprobs = reinterpret_cast<float*>(out.data() + logprobs_);
    s.status = reinterpret_cast<int32_t*>(out.data() + status_);
    s.statistics = reinterpret_cast<RowStatistics*>(out.data() + statistics_);
    polyspec::VerifyParams v;
    v.batch = batch_;
    v.draft_len = 1;
    v.vocab = v.draft_vocab = vocab_;
    v.target_logits = v.draft_logits = s.logits;
    v.target_stride[0] = v.draft_stride[0] = 2 * vocab_;
    v.target_stride[1] = v.draft_stride[1] = vocab_;
    v.draft_statistics = s.statistics;
    v.draft_tokens = s.tokens;
    v.draft_tokens_stride = 1;
    v.draw.seed.value = seed;
    v.tokens = reinterpret_cast<int64_t*>(out.data() + tokens_);
    v.num_accepted = reinterpret_cast<int64_t*>(out.data() + accepted_);
    v.logprobs = s.logprobs;
    v.status = s.status;
    v.workspace = workspace(stream_);
    CUDA_OK(cudaStreamSynchronize(stream_));
    CHECK(run(s, overlapping).ok());
    CHECK(run(v, overlapping).ok());
    CUDA_OK(cudaStreamSynchronize(stream_));
    const std::vector<unsigned char> got = out.read();
    for (int64_t b = 0; b < batch_; ++b) {
      CHECK_EQ(0, reinterpret_cast<const int32_t*>(got.data() + status_)[b]);
      CHECK_EQ(1, reinterpret_cast<const int64_t*>(got.data() + accepted_)[b]);
      CHECK_EQ(reinterpret_cast<const int64_t*>(got.data() + drafted_)[b],
               reinterpret_cast<const int64_t*>(got.data() + tokens_)[2 * b]);
    }
  }

 private:
  size_t rows() const { return static_cast<size_t>(batch_); }
  // [batch, 2, vocab]: the second row is flat.
  std::vector<unsigned char> random_logits() const {
    cases::Random random(5);
    std::vector<float> logits(static_cast<size_t>(batch_ * 2 * vocab_), 0.0f);
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i < vocab_; ++i)
        logits[static_cast<size_t>(2 * b * vocab_ + i)] = random.normal();
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(logits.data());
    return {bytes, bytes + logits.size() * sizeof(float)};
  }

  int64_t batch_, vocab_;
  cudaStream_t stream_;
  DeviceBytes logits_;
  cases::Block results_;
  size_t drafted_, statistics_, tokens_, accepted_, logprobs_, status_;
};

void passed(const std::string& what) {
  std::printf("%s: passed\n", what.c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (!polyspec::cuda::available()) {
    std::printf("skipped: no CUDA device that these kernels run on\n");
    return 77;
  }
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400;
  const int64_t largest = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 1050000;
  const bool few = count < 64;
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreate(&stream));
  const cudaStream_t stream = streams[0];
  for (uint64_t seed = 0; seed < 2 * count; ++seed) {
    compare<cases::ScheduleDueCase>(seed, stream, "schedule_due");
    compare<cases::ScheduleNextCase>(seed, stream, "schedule_next");
    compare<cases::ScheduleReportCase>(seed, stream, "schedule_report");
    compare<cases::AppendCase>(seed, stream, "append");
    compare<cases::PagedAppendCase>(seed, stream, "append_paged");
    compare<cases::CompactTreeCase>(seed, stream, "compact_tree");
    compare<cases::PagesCase<true>>(seed, stream, "reserve_pages");
    compare<cases::PagesCase<false>>(seed, stream, "truncate_pages");
  }
  Compared<cases::ScheduleNextCase>(5, {}, stream, "schedule_next").check_graph();
  Compared<cases::ScheduleReportCase>(6, {}, stream, "schedule_report").check_graph();
  Compared<cases::AppendCase>(7, {}, stream, "append").check_graph();
  passed("state rows and caches");

  const std::vector<Shape> shapes = all_shapes();
  for (uint64_t seed = 0; seed < count; ++seed) {
    compare<cases::SampleCase>(seed, {}, shapes, stream, "sample");
    compare<cases::VerifyCase>(seed, {}, shapes, stream, "verify");
    compare<cases::IndexedVerifyCase>(seed, {}, shapes, stream, "indexed verify");
    compare<cases::TreeCase>(seed, {}, shapes, stream, "verify_tree");
    compare<cases::IndexedTreeCase>(seed, {}, shapes, stream, "indexed verify_tree");
  }
  passed("random cases");
  // Several rows of large vocabularies, of the largest (tiles of 2048) fewer; and a large tree.
  for (const int64_t vocab : {int64_t{9000}, int64_t{50257}, int64_t{128256}, int64_t{1050000}}) {
    if (vocab > largest) continue;
    const bool most = vocab > 1 << 20;
    for (uint64_t seed = 0; seed < (few || most ? 1 : 3); ++seed) {
      compare<cases::SampleCase>(seed, {vocab, 3}, shapes, stream, "sample");
      compare<cases::VerifyCase>(seed, {vocab, most ? 1 : 2, most ? 2 : 4}, shapes, stream,
                                 "verify");
      compare<cases::TreeCase>(seed, {vocab, 1, most ? 2 : 7}, shapes, stream, "verify_tree");
    }
    passed("vocabulary " + std::to_string(vocab));
  }
  for (uint64_t seed = 0; seed < (few ? 1 : 8); ++seed)
    compare<cases::TreeCase>(seed, {few ? 100 : 1000, 2, 60}, shapes, stream, "verify_tree");
  passed("trees of 60 nodes");

  const int64_t middle = std::min<int64_t>(largest, 50257);
  const Compared<cases::SampleCase> sampled(3, 1000, stream, "sample");
  const Compared<cases::VerifyCase> verified(4, middle, stream, "verify");
  const Compared<cases::TreeCase> tree(4, middle, stream, "verify_tree");
  const TwoStreams two_streams(streams, few ? 8 : 64);
  const Overlap overlap(few ? 4 : 64, few ? 1000 : 40000, stream);
  for (const Shape& shape : shapes) {
    force(shape);
    sampled.check_graph();
    verified.check_graph();
    tree.check_graph();
    two_streams.check(few ? 2 : 20);
    for (uint64_t seed = 0; seed < (few ? 2 : 50); ++seed) overlap.check(seed);
    passed("graphs, two streams and overlap with " + shown(shape) +
           " (0 and -1: the backend chooses)");
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
