// A captured call's release is called when its graph, and all instances of it, are gone. Skipped
// (77) without kernels or without a device that runs them.
#include "cuda/launch.hpp"
#include "polyspec/capture.hpp"
#include "support/check.hpp"

#ifdef POLYSPEC_WITH_CUDA
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace {

#define CUDA_OK(call) CHECK_EQ(std::string("no error"), cudaGetErrorString(call))

using polyspec::Stream;

void count(void* calls) { ++*static_cast<std::atomic<int>*>(calls); }

// The driver's thread may be late.
bool reaches(const std::atomic<int>& calls, int expected) {
  for (int i = 0; i < 1000 && calls != expected; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return calls == expected;
}

cudaGraph_t captured(cudaStream_t stream, void* memory, std::atomic<int>* calls) {
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(polyspec::when_graph_goes(Stream::on(stream), &count, calls).ok());
  CUDA_OK(cudaMemsetAsync(memory, 0, 16, stream));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  return graph;
}

void test_release_follows_the_last_of_the_graph(cudaStream_t stream) {
  std::atomic<int> calls{0};
  void* memory = nullptr;
  CUDA_OK(cudaMalloc(&memory, 16));
  CHECK(!polyspec::when_graph_goes(Stream::on(stream), &count, &calls).ok());
  for (int i = 0; i < 3; ++i) {
    cudaGraph_t graph = captured(stream, memory, &calls);
    cudaGraphExec_t executable = nullptr;
    CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaGraphLaunch(executable, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    CHECK_EQ(i, calls.load());
    CUDA_OK(cudaGraphExecDestroy(executable));
    CHECK(reaches(calls, i + 1));
  }
  CUDA_OK(cudaFree(memory));
}

}  // namespace

int main() {
  if (!polyspec::cuda::available()) return 77;
  cudaStream_t stream = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  test_release_follows_the_last_of_the_graph(stream);
  CUDA_OK(cudaStreamDestroy(stream));
  return 0;
}

#else

int main() { return 77; }

#endif
