// The CUDA backend against the CPU backend: the same calls over copies of the same memory, equal in
// every byte of the poisoned outputs; of attention in bfloat16 to rounding. Goes on after a
// failure, counts by operator and shape, and prints three examples of each; a size of clusters that
// is asked for and not launched is a failure. Then it prints how many clusters of each kernel and
// size the device runs at the same time. Skipped (77) without kernels or without a device that runs
// them.
//
//   cuda_test [cases [vocabulary]]    other than 400 random cases of each kind, and the largest
//                                     vocabulary; with fewer than 64 cases all else is less, too
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/launch.hpp"
#include "cuda/launch_shape.hpp"
#include "support/check.hpp"
#include "support/random_cache.hpp"
#include "support/random_dense.hpp"
#include "support/random_indexed.hpp"
#include "support/random_int4.hpp"
#include "support/random_layer.hpp"
#include "support/random_schedule.hpp"

#ifdef POLYSPEC_WITH_CUDA
#include <cuda_runtime_api.h>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "gpu/intrinsics.hpp"

namespace {

using polyspec::Result;
using polyspec::Stream;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void cuda_ok(const char* call, cudaError_t error) {
  if (error != cudaSuccess) throw Failure(std::string(call) + ": " + cudaGetErrorString(error));
}
#define CUDA_OK(call) cuda_ok(#call, call)

void result_ok(const Result& result, const std::string& name) {
  if (!result.ok()) throw Failure(name + ": " + result.message);
}

void same(const std::vector<unsigned char>& expected, const std::vector<unsigned char>& got,
          const std::string& name) {
  const std::string found = cases::difference(expected, got);
  if (!found.empty()) throw Failure(name + ": " + found);
}

// The number of checks, by operator and shape, and the first failures of each.
class Tally {
 public:
  // Runs a check, which throws where it fails. Throws itself where the device does not answer any
  // more: every later check would fail for that.
  template <class Check>
  void run(const std::string& what, const Check& check) {
    Row& row = rows_[what];
    ++row.checks;
    try {
      check();
    } catch (const std::exception& error) {
      if (++row.failed <= 3) row.examples.push_back(error.what());
      const cudaError_t device = cudaDeviceSynchronize();
      if (device != cudaSuccess)
        throw std::runtime_error(std::string("the device fails from now on: ") + error.what());
      cudaGetLastError();
    }
  }
  // The rows; how many of them have failures.
  int print() const {
    int failed = 0;
    int64_t checks = 0;
    for (const auto& [what, row] : rows_) {
      checks += row.checks;
      if (row.failed == 0) continue;
      ++failed;
      std::printf("FAILED: %s: %lld of %lld\n", what.c_str(), static_cast<long long>(row.failed),
                  static_cast<long long>(row.checks));
      for (const std::string& example : row.examples) std::printf("  %s\n", example.c_str());
    }
    std::printf("%lld checks of %zu operators and shapes: %d failed\n",
                static_cast<long long>(checks), rows_.size(), failed);
    return failed;
  }

 private:
  struct Row {
    int64_t checks = 0, failed = 0;
    std::vector<std::string> examples;
  };
  std::map<std::string, Row> rows_;
};
Tally tally;

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
Result run(const polyspec::LengthsParams& params, Stream stream) {
  return polyspec::update_lengths(params, stream);
}
Result run(const polyspec::CopyRowsParams& params, Stream stream) {
  return polyspec::copy_rows(params, stream);
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
Result run(const polyspec::RmsNormParams& params, Stream stream) {
  return polyspec::rms_norm(params, stream);
}
Result run(const polyspec::RotaryParams& params, Stream stream) {
  return polyspec::rotary(params, stream);
}
Result run(const polyspec::RotaryAppendParams& params, Stream stream) {
  return polyspec::rotary_append(params, stream);
}
Result run(const polyspec::GatedParams& params, Stream stream) {
  return polyspec::gated(params, stream);
}
Result run(const cases::AttentionCase::Params& params, Stream stream) { return params.run(stream); }

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
    result_ok(polyspec::clear_workspace(mine->data(), polyspec::kVerifyWorkspaceBytes,
                                        Stream::on(stream)),
              "clear_workspace");
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

cases::AttentionCase::Params with_workspace(cases::AttentionCase::Params params, cudaStream_t) {
  static const DeviceBytes memory(std::vector<unsigned char>(64 << 20));
  params.use(memory.data(), 64 << 20);
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
  if (shape.groups < 0) return "the backend's shape";
  const std::string groups = shape.groups == 0         ? "walkers"
                             : shape.groups == 1 << 20 ? "a group for each row"
                                                       : std::to_string(shape.groups) + " groups";
  return groups + " of " + std::to_string(shape.ctas) + " CTAs";
}

// A call on the device, compared with the CPU backend.
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

  void run() const { result_ok(::run(params(), Stream::on(stream_)), name_); }

  void poison() const { outputs_.write(call_.outputs.bytes); }
  void check_outputs(const std::string& how) const {
    CUDA_OK(cudaStreamSynchronize(stream_));
    std::vector<unsigned char> made = outputs_.read();
    cases::allow_rounding(call_, expected_, &made);
    same(expected_, made, name_ + how);
  }
  void check_inputs() const { same(input_bytes_, inputs_.read(), name_ + ", inputs"); }

  // A captured call reads its inputs when it is replayed, not when it was captured.
  void check_graph() const {
    inputs_.write(std::vector<unsigned char>(input_bytes_.size(), 0));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    params();  // allocates the workspace, which a capture cannot
    const bool before = polyspec::is_capturing(Stream::on(stream_));
    CUDA_OK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    const bool during = polyspec::is_capturing(Stream::on(stream_));
    const Result result = ::run(params(), Stream::on(stream_));
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);  // after an error as well
    result_ok(result, name_ + ", captured");
    CUDA_OK(ended);
    if (before || !during) throw Failure(name_ + ": is_capturing does not say so");
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
    tally.run(name + ", " + shown(shape), [&] {
      force(shape);
      call.poison();
      call.run();
      call.check_outputs("");
    });
  }
  tally.run(name + ", inputs", [&] { call.check_inputs(); });
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

// Prints that a part is done, how long it took, and the failures so far: a run may be cut short.
void done(const std::string& what) {
  static auto began = std::chrono::steady_clock::now();
  const auto now = std::chrono::steady_clock::now();
  std::printf("%s: %.1f s; ", what.c_str(), std::chrono::duration<double>(now - began).count());
  tally.print();
  std::fflush(stdout);
  began = now;
}

// A line for each kernel: clusters by CTAs of each.
void print_active_clusters() {
  std::map<std::string, std::map<int, int>> kernels;
  for (const auto& [kernel, ctas, clusters] : polyspec::cuda::active_clusters())
    kernels[kernel][ctas] = clusters;
  std::printf("clusters that run at the same time, by CTAs of each:\n");
  for (const auto& [kernel, clusters] : kernels) {
    const size_t name = kernel.find("kernel = ") + 9;  // of the compiler's name of the template
    std::printf("  %s", kernel.substr(name, kernel.find(';', name) - name).c_str());
    for (const auto& [ctas, count] : clusters) std::printf(", %d: %d", ctas, count);
    std::printf("\n");
  }
}

// Within the bound, and a row the same as alone; the simulated device is compared bit for bit
// (random_calls_test).
void check_int4(uint64_t seed, cudaStream_t stream) {
  const cases::Int4Case call(seed);
  const DeviceBytes inputs(call.inputs.bytes), outputs(call.outputs.bytes);
  result_ok(call.pack(inputs.data(), outputs.data(), Stream::on(stream)), "int4_pack");
  result_ok(call.multiply(inputs.data(), outputs.data(), Stream::on(stream)), "int4_product");
  CUDA_OK(cudaStreamSynchronize(stream));
  const std::string fault = call.fault(outputs.read(), false);
  if (!fault.empty()) throw Failure("int4 case " + std::to_string(seed) + ": " + fault);
}

// The same of bfloat16 weights. Returns whether they are multiplied: the device has bulk copies.
bool check_dense(uint64_t seed, cudaStream_t stream) {
  const cases::DenseCase call(seed);
  const DeviceBytes inputs(call.inputs.bytes), outputs(call.outputs.bytes);
  const Result result = call.multiply(inputs.data(), outputs.data(), Stream::on(stream));
  if (result.code == Result::Code::kUnsupported) return false;
  result_ok(result, "dense_product");
  CUDA_OK(cudaStreamSynchronize(stream));
  const std::string fault = call.fault(outputs.read(), false);
  if (!fault.empty()) throw Failure("dense case " + std::to_string(seed) + ": " + fault);
  return true;
}

void check_int4_heads(uint64_t seed, cudaStream_t stream) {
  const cases::Int4HeadsCase call(seed);
  const DeviceBytes inputs(call.inputs.bytes), memory(call.memory.bytes),
      outputs(call.outputs.bytes), apart(call.outputs.bytes);
  const Stream on = Stream::on(stream);
  result_ok(call.pack(inputs.data(), memory.data(), on), "int4_pack");
  for (const bool one_by_one : {false, true}) {
    const DeviceBytes& out = one_by_one ? apart : outputs;
    result_ok(call.multiply(inputs.data(), memory.data(), out.data(), one_by_one, on),
              "int4_rotary_product");
  }
  CUDA_OK(cudaStreamSynchronize(stream));
  const std::string fault = cases::difference(apart.read(), outputs.read());
  if (!fault.empty()) throw Failure("int4 with heads, case " + std::to_string(seed) + ": " + fault);
}

void run_all(uint64_t count, int64_t largest) {
  const bool few = count < 64;
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamCreate(&stream));
  const cudaStream_t stream = streams[0];
  // The device loads a kernel when it is launched for the first time: here within a capture.
  tally.run("first launch in a capture, sample",
            [&] { Compared<cases::SampleCase>(3, 1000, stream, "sample").check_graph(); });
  tally.run("first launch in a capture, verify",
            [&] { Compared<cases::VerifyCase>(4, 1000, stream, "verify").check_graph(); });
  tally.run("first launch in a capture, verify_tree",
            [&] { Compared<cases::TreeCase>(4, 1000, stream, "verify_tree").check_graph(); });
  done("first launches in captures");

  for (uint64_t seed = 0; seed < 2 * count; ++seed) {
    compare<cases::ScheduleDueCase>(seed, stream, "schedule_due");
    compare<cases::ScheduleNextCase>(seed, stream, "schedule_next");
    compare<cases::ScheduleReportCase>(seed, stream, "schedule_report");
    compare<cases::AppendCase>(seed, stream, "append");
    compare<cases::PagedAppendCase>(seed, stream, "append_paged");
    compare<cases::CompactTreeCase>(seed, stream, "compact_tree");
    compare<cases::LengthsCase>(seed, stream, "update_lengths");
    compare<cases::CopyRowsCase>(seed, stream, "copy_rows");
    compare<cases::PagesCase<true>>(seed, stream, "reserve_pages");
    compare<cases::PagesCase<false>>(seed, stream, "truncate_pages");
  }
  tally.run("graph, schedule_next", [&] {
    Compared<cases::ScheduleNextCase>(5, {}, stream, "schedule_next").check_graph();
  });
  tally.run("graph, schedule_report", [&] {
    Compared<cases::ScheduleReportCase>(6, {}, stream, "schedule_report").check_graph();
  });
  tally.run("graph, append",
            [&] { Compared<cases::AppendCase>(7, {}, stream, "append").check_graph(); });
  done("state rows and caches");

  uint64_t multiplied = 0;
  for (uint64_t seed = 0; seed < 2 * count; ++seed) {
    compare<cases::RmsNormCase>(seed, stream, "rms_norm");
    compare<cases::RotaryCase>(seed, stream, "rotary");
    compare<cases::RotaryAppendCase>(seed, stream, "rotary_append");
    compare<cases::GatedCase>(seed, stream, "gated");
    compare<cases::AttentionCase>(seed, stream, "attention");
    tally.run("int4", [&] { check_int4(seed, stream); });
    tally.run("dense", [&] { multiplied += check_dense(seed, stream); });
    tally.run("int4 with heads", [&] { check_int4_heads(seed, stream); });
  }
  tally.run("graph, rotary_append", [&] {
    Compared<cases::RotaryAppendCase>(8, {}, stream, "rotary_append").check_graph();
  });
  tally.run("graph, attention",
            [&] { Compared<cases::AttentionCase>(9, {}, stream, "attention").check_graph(); });
  tally.run("dense, all or none", [&] {
    if (multiplied != 0 && multiplied != 2 * count) throw Failure("some were unsupported");
  });
  done("decoder layers, " + std::to_string(multiplied) + " dense products");

  const std::vector<Shape> shapes = all_shapes();
  for (uint64_t seed = 0; seed < count; ++seed) {
    compare<cases::SampleCase>(seed, {}, shapes, stream, "sample");
    compare<cases::VerifyCase>(seed, {}, shapes, stream, "verify");
    compare<cases::IndexedVerifyCase>(seed, {}, shapes, stream, "indexed verify");
    compare<cases::TreeCase>(seed, {}, shapes, stream, "verify_tree");
    compare<cases::IndexedTreeCase>(seed, {}, shapes, stream, "indexed verify_tree");
  }
  done("random cases");

  // Reads see the writes of another multiprocessor to distributed shared memory, and of another
  // stream to global memory, not old values in a cache.
  const int64_t middle = std::min<int64_t>(largest, 50257);
  const Compared<cases::SampleCase> sampled(3, 1000, stream, "sample");
  const Compared<cases::VerifyCase> verified(4, middle, stream, "verify");
  const Compared<cases::TreeCase> tree(4, middle, stream, "verify_tree");
  const TwoStreams two_streams(streams, few ? 8 : 64);
  for (const Shape& shape : shapes) {
    force(shape);
    tally.run("graph, sample, " + shown(shape), [&] { sampled.check_graph(); });
    tally.run("graph, verify, " + shown(shape), [&] { verified.check_graph(); });
    tally.run("graph, verify_tree, " + shown(shape), [&] { tree.check_graph(); });
    tally.run("two streams, " + shown(shape), [&] { two_streams.check(few ? 2 : 20); });
  }
  done("graphs and two streams");

  // Several rows of large vocabularies, of the largest (tiles of 2048) fewer; and a large tree.
  for (const int64_t vocab : {int64_t{9000}, int64_t{50257}, int64_t{128256}, int64_t{1050000}}) {
    if (vocab > largest) continue;
    const bool most = vocab > 1 << 20;
    for (uint64_t seed = 0; seed < (few || most ? 1 : 3); ++seed) {
      compare<cases::SampleCase>(seed, {vocab, 3}, shapes, stream, "sample, large");
      compare<cases::VerifyCase>(seed, {vocab, most ? 1 : 2, most ? 2 : 4}, shapes, stream,
                                 "verify, large");
      compare<cases::TreeCase>(seed, {vocab, 1, most ? 2 : 7}, shapes, stream,
                               "verify_tree, large");
    }
    done("vocabulary " + std::to_string(vocab));
  }
  for (uint64_t seed = 0; seed < (few ? 1 : 8); ++seed)
    compare<cases::TreeCase>(seed, {few ? 100 : 1000, 2, 60}, shapes, stream, "tree of 60 nodes");
  done("trees of 60 nodes");
  print_active_clusters();
  for (const std::string& wrong : intrinsics::wrong_answers())
    tally.run("intrinsics", [&] { throw Failure(wrong); });
  done("intrinsics");
  for (cudaStream_t& stream : streams) CUDA_OK(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  if (!polyspec::cuda::available()) {
    std::printf("skipped: no CUDA device that these kernels run on\n");
    return 77;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  int failed = 0;
  try {
    run_all(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 400,
            argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 1050000);
  } catch (const std::exception& error) {
    failed = 1;
    std::printf("FAILED: ended early: %s\n", error.what());
  }
  print_active_clusters();
  failed += tally.print();
  return failed == 0 ? 0 : 1;
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
