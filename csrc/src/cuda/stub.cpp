// Stands in for the CUDA backend in a build without it.
#include "cuda/launch.hpp"

namespace polyspec::cuda {

static Result unsupported() {
  return {Result::Code::kUnsupported,
          "this build of polyspec has no CUDA kernels; configure with POLYSPEC_CUDA=ON"};
}

Result sample(const SampleParams&, const Stream&) { return unsupported(); }
Result verify(const VerifyParams&, const Stream&) { return unsupported(); }
bool available() { return false; }
void force_shape(int, int) {}
Result clear(void*, int64_t, const Stream&) { return unsupported(); }
bool is_capturing(const Stream&) { return false; }

}  // namespace polyspec::cuda
