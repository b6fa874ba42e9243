// The verification kernel for target logits in float16.
#include "cuda/kernels.cuh"

namespace polyspec::cuda {

template <>
cudaError_t launch_verify<detail::Float16>(const VerifyParams& params, cudaStream_t stream) {
  return launch(verify_kernel<detail::Float16>, kVerifyThreads, params, stream);
}

}  // namespace polyspec::cuda
