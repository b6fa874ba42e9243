// Resources of captured calls: a graph refers to them as user objects, and so does everything that
// is instantiated from it.
#include "cuda/capture.hpp"

#include <cuda_runtime_api.h>

#include "cuda/cuda_error.hpp"

namespace polyspec::cuda {
namespace {

// The graph that the stream is being captured into; nullptr where it is not.
cudaError_t graph_of(cudaStream_t stream, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, graph, nullptr, nullptr);
#endif
  if (status != cudaStreamCaptureStatusActive) *graph = nullptr;
  return error;
}

Result failed(cudaError_t error) {
  cudaGetLastError();  // not for the next caller
  return cuda_error(error);
}

}  // namespace

Result when_graph_goes(const Stream& stream, void (*release)(void*), void* argument) {
  cudaGraph_t graph = nullptr;
  cudaError_t error = graph_of(stream.cuda, &graph);
  if (error != cudaSuccess) return failed(error);
  if (graph == nullptr)
    return {Result::Code::kInvalidArgument,
            "stream: expected one that is being captured, given one that is not"};
  // The only reference becomes the graph's. Where it cannot take it, the object is left alone,
  // since giving the reference up would call `release`.
  cudaUserObject_t object = nullptr;
  error = cudaUserObjectCreate(&object, argument, release, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) return failed(error);
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  return error == cudaSuccess ? Result{} : failed(error);
}

}  // namespace polyspec::cuda
