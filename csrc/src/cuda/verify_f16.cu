// The verification kernels for target logits in float16.
#include "cuda/launch.cuh"

namespace polyspec::cuda {

template <>
cudaError_t launch_verify<core::Float16>(const VerifyParams& params, const Stream& stream) {
  return launch_verify_kernel<core::Float16>(params, stream);
}

}  // namespace polyspec::cuda
