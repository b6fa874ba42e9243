// polyspec/capture.hpp over the backends.
#include "polyspec/capture.hpp"

#include "api/checks.hpp"
#include "cuda/capture.hpp"

namespace polyspec {

Result when_graph_goes(Stream stream, void (*release)(void*), void* argument) {
  if (release == nullptr) return invalid("release: expected a function, given null");
  if (stream.device != Stream::Device::kCuda)
    return invalid("stream: expected a CUDA stream, given the CPU");
  return cuda::when_graph_goes(stream, release, argument);
}

}  // namespace polyspec
