// The verification kernels for target logits in float32.
#include "cuda/launch.cuh"

namespace polyspec::cuda {

template <>
cudaError_t launch_verify<float>(const VerifyParams& params, const Stream& stream) {
  return launch_verify_kernel<float>(params, stream);
}

}  // namespace polyspec::cuda
