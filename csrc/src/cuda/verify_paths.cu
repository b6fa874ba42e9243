// The block rule of polyspec::verify_tree on CUDA: the kernels for all element types. Rows depend
// on the rows above them, so that a group walks and a workspace is of no use.
#include "cuda/launch.cuh"
#include "cuda/paths_kernel.cuh"

namespace polyspec::cuda {
namespace {

template <class T, Requests kind>
cudaError_t launch_kind(const VerifyTreeParams& params, const Stream& stream) {
  return launch<paths_kernel<T, kind, kResidualThreads>>(params.batch, kResidualThreads, params,
                                                         stream);
}

template <class T>
cudaError_t launch_type(const VerifyTreeParams& params, Requests requests, const Stream& stream) {
  if (params.allowed != nullptr)
    return launch_kind<core::Masked<T>, Requests::kAny>(params, stream);
  return requests == Requests::kUnfiltered ? launch_kind<T, Requests::kUnfiltered>(params, stream)
                                           : launch_kind<T, Requests::kAny>(params, stream);
}

}  // namespace

Result launch_paths(const VerifyTreeParams& params, Requests requests, const Stream& stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return result_of(launch_type<float>(params, requests, stream));
    case DType::kBFloat16:
      return result_of(launch_type<core::BFloat16>(params, requests, stream));
    default:
      return result_of(launch_type<core::Float16>(params, requests, stream));
  }
}

}  // namespace polyspec::cuda
