// The CUDA backend of polyspec/capture.hpp.
#pragma once

#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec::cuda {

// Arguments are checked already (capture.cpp of api).
Result when_graph_goes(const Stream& stream, void (*release)(void*), void* argument);

}  // namespace polyspec::cuda
