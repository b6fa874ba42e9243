// The kernels of polyspec::sample and polyspec::verify and how they are launched.
//
// One CTA works on one request: it walks the rows of its block and stops at the first rejection, so
// later rows are not read. Everything happens in this one launch: no workspace, nothing to clear,
// no value read on the host, so a launch can be captured in a CUDA graph. Parameters travel by
// value; what their pointers lead to is read when the kernel runs.
#pragma once

#include <cstdint>

#include "cuda/cta_group.cuh"
#include "polyspec/detail/sample_request.hpp"
#include "polyspec/detail/verify_request.hpp"

namespace polyspec::cuda {

// Threads of a CTA. More warps hide more of a row's latency; these are the most that leave each
// thread the registers it wants (at most 65536 / threads), so that nothing spills.
constexpr int kSampleThreads = 512;
constexpr int kVerifyThreads = 384;

// T is the element type of the (target's) logits. __grid_constant__ lets the row algorithms hold
// references to the parameters without a copy of them in every thread's local memory.
template <class T>
__global__ void __launch_bounds__(kSampleThreads, 1)
    sample_kernel(const __grid_constant__ SampleParams params) {
  __shared__ detail::CtaShared<kSampleThreads> shared;
  detail::CtaGroup<kSampleThreads> group(shared);
  for (int64_t request = blockIdx.x; request < params.batch; request += gridDim.x) {
    detail::sample_request<T>(group, params, request);
  }
}

template <class T>
__global__ void __launch_bounds__(kVerifyThreads, 1)
    verify_kernel(const __grid_constant__ VerifyParams params) {
  __shared__ detail::CtaShared<kVerifyThreads> shared;
  detail::CtaGroup<kVerifyThreads> group(shared);
  for (int64_t request = blockIdx.x; request < params.batch; request += gridDim.x) {
    detail::verify_request<T>(group, params, request);
  }
}

// Launches one CTA per request. The error, if there is one, is this launch's own and is not left
// behind for the next caller of cudaGetLastError.
template <class Params>
cudaError_t launch(void (*kernel)(Params), int threads, const Params& params, cudaStream_t stream) {
  constexpr int64_t kMaxGrid = 0x7fffffff;  // beyond it a CTA takes several requests
  const int64_t grid = params.batch < kMaxGrid ? params.batch : kMaxGrid;
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error =
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid)),
                       dim3(static_cast<unsigned>(threads)), arguments, 0, stream);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// One definition per element type, each in a file of its own: verify_<type>.cu.
template <class T>
cudaError_t launch_verify(const VerifyParams& params, cudaStream_t stream);

}  // namespace polyspec::cuda
