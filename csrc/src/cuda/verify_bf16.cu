// The verification kernels for target logits in bfloat16.
#include "cuda/launch.cuh"

namespace polyspec::cuda {

template <>
cudaError_t launch_verify<core::BFloat16>(const VerifyParams& params, const Stream& stream) {
  return launch_verify_kernel<core::BFloat16>(params, stream);
}

}  // namespace polyspec::cuda
