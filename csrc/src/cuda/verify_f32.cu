// The verification kernel for target logits in float32.
#include "cuda/kernels.cuh"

namespace polyspec::cuda {

template <>
cudaError_t launch_verify<float>(const VerifyParams& params, cudaStream_t stream) {
  return launch(verify_kernel<float>, kVerifyThreads, params, stream);
}

}  // namespace polyspec::cuda
