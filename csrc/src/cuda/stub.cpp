// Stands in for the CUDA backend in a build without it.
#include "cuda/launch.hpp"

namespace polyspec::cuda {

static Result unsupported() {
  return {Result::Code::kUnsupported,
          "this build of polyspec has no CUDA kernels; configure with POLYSPEC_CUDA=ON"};
}

Result sample(const SampleParams&, CUstream_st*) { return unsupported(); }
Result verify(const VerifyParams&, CUstream_st*) { return unsupported(); }
bool available() { return false; }

}  // namespace polyspec::cuda
