// The CUDA backend's entry points: choose the kernel for the logits' element type, and see whether
// any can run.
#include "cuda/kernels.cuh"
#include "cuda/launch.hpp"

namespace polyspec::cuda {
namespace {

Result result_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {Result::Code::kCudaError, cudaGetErrorString(error)};
}

// Whether this build has code for the current device; this makes its context, as the first launch
// would.
bool has_image() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&sample_kernel<float>)) ==
         cudaSuccess;
}

bool current_device_runs_kernels() {
  int count = 0;
  int device = 0;
  int major = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 8 && has_image();
}

}  // namespace

Result sample(const SampleParams& params, CUstream_st* stream) {
  switch (params.dtype) {
    case DType::kFloat32:
      return result_of(launch(sample_kernel<float>, kSampleThreads, params, stream));
    case DType::kBFloat16:
      return result_of(launch(sample_kernel<detail::BFloat16>, kSampleThreads, params, stream));
    case DType::kFloat16:
      return result_of(launch(sample_kernel<detail::Float16>, kSampleThreads, params, stream));
  }
  return {Result::Code::kInvalidArgument, "dtype is not a DType"};
}

Result verify(const VerifyParams& params, CUstream_st* stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return result_of(launch_verify<float>(params, stream));
    case DType::kBFloat16:
      return result_of(launch_verify<detail::BFloat16>(params, stream));
    case DType::kFloat16:
      return result_of(launch_verify<detail::Float16>(params, stream));
  }
  return {Result::Code::kInvalidArgument, "target_dtype is not a DType"};
}

bool available() {
  const bool runs = current_device_runs_kernels();
  if (!runs) cudaGetLastError();  // a machine without a device is no error of anybody's
  return runs;
}

}  // namespace polyspec::cuda
