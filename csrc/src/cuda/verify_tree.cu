// polyspec::verify_tree on CUDA: the kernels for all element types.
#include "cuda/launch.cuh"

namespace polyspec::cuda {
namespace {

template <class T>
Result launch_tree(const VerifyTreeParams& params, const Stream& stream) {
  return result_of(launch(request_kernel<T, kVerifyThreads, VerifyTreeParams>, params.batch,
                          kVerifyThreads, params, stream));
}

}  // namespace

Result verify_tree(const VerifyTreeParams& params, const Stream& stream) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return launch_tree<float>(params, stream);
    case DType::kBFloat16:
      return launch_tree<core::BFloat16>(params, stream);
    case DType::kFloat16:
      return launch_tree<core::Float16>(params, stream);
  }
  return {Result::Code::kInvalidArgument, "target_dtype: expected a DType, given another number"};
}

}  // namespace polyspec::cuda
