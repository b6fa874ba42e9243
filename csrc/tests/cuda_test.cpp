// The CUDA backend against the CPU backend: the same calls over copies of the same memory, equal in
// every byte of the poisoned outputs. Skipped (77) without kernels or without a device that runs
// them.
#include <cstdio>
#include <cstdlib>

#include "check.hpp"
#include "cuda/launch.hpp"
#include "random_case.hpp"

#ifdef POLYSPEC_WITH_CUDA
#include <cuda_runtime_api.h>

namespace {

#define CUDA_OK(call) CHECK_EQ(std::string("no error"), cudaGetErrorString(call))

using polyspec::Result;
using polyspec::Stream;

Result run(const polyspec::SampleParams& params, Stream stream) {
  return polyspec::sample(params, stream);
}
Result run(const polyspec::VerifyParams& params, Stream stream) {
  return polyspec::verify(params, stream);
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

template <class Case>
void compare(uint64_t seed, int64_t forced_vocab, cudaStream_t stream, const std::string& kind) {
  const Case call(seed, forced_vocab);
  std::vector<unsigned char> expected = call.outputs.bytes;
  CHECK(run(call.params(call.inputs.bytes.data(), expected.data()), Stream::cpu()).ok());
  const DeviceBytes inputs(call.inputs.bytes);
  const DeviceBytes outputs(call.outputs.bytes);
  const Result result = run(call.params(inputs.data(), outputs.data()), Stream::on(stream));
  CHECK_EQ(std::string(""), result.message);
  CUDA_OK(cudaStreamSynchronize(stream));
  const std::string name = kind + " case " + std::to_string(seed);
  cases::check_same(expected, outputs.read(), name);
  cases::check_same(call.inputs.bytes, inputs.read(), name + ", inputs");
}

// A captured call reads its inputs when it is replayed, not when it was captured.
void test_graph(cudaStream_t stream) {
  const cases::SampleCase call(3, 1000);
  std::vector<unsigned char> expected = call.outputs.bytes;
  CHECK(polyspec::sample(call.params(call.inputs.bytes.data(), expected.data())).ok());
  const DeviceBytes inputs(std::vector<unsigned char>(call.inputs.bytes.size(), 0));
  const DeviceBytes outputs(call.outputs.bytes);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(polyspec::sample(call.params(inputs.data(), outputs.data()), Stream::on(stream)).ok());
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_OK(cudaMemcpy(inputs.data(), call.inputs.bytes.data(), call.inputs.bytes.size(),
                     cudaMemcpyHostToDevice));
  CUDA_OK(cudaGraphLaunch(executable, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  cases::check_same(expected, outputs.read(), "graph replay");
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaGraphDestroy(graph));
}

}  // namespace

int main(int argc, char** argv) {
  if (!polyspec::cuda::available()) {
    std::printf("skipped: no CUDA device that these kernels run on\n");
    return 77;
  }
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreate(&stream));
  for (uint64_t seed = 0; seed < count; ++seed) {
    compare<cases::SampleCase>(seed, 0, stream, "sample");
    compare<cases::VerifyCase>(seed, 0, stream, "verify");
  }
  for (const int64_t vocab : {int64_t{50257}, int64_t{128256}, int64_t{1050000}}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      compare<cases::SampleCase>(seed, vocab, stream, "sample");
      compare<cases::VerifyCase>(seed, vocab, stream, "verify");
    }
  }
  test_graph(stream);
  CUDA_OK(cudaStreamDestroy(stream));
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
