// CUDA's errors as results.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

#include "polyspec/status.hpp"

namespace polyspec::cuda {

inline Result cuda_error(cudaError_t error) {
  Result out{Result::Code::kCudaError};
  std::snprintf(out.message, sizeof out.message, "%s", cudaGetErrorString(error));
  return out;
}

}  // namespace polyspec::cuda
