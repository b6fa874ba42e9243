// What the CUDA sources ask of the CUDA runtime and its language, so that csrc/tests/cuda_on_cpu
// can stand in for both: shared memory by name, and launches that know their kernel's parameters.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cuda_error.hpp"

// A variable in the shared memory of a CTA; at the beginning of a kernel.
#ifndef POLYSPEC_SHARED
#define POLYSPEC_SHARED(type, name) __shared__ type name
#endif
// All of the shared memory that the launch asks for, config.dynamicSmemBytes.
#ifndef POLYSPEC_DYNAMIC_SHARED
#define POLYSPEC_DYNAMIC_SHARED(type, name)                  \
  extern __shared__ __align__(16) unsigned char name##_of[]; \
  type& name = *reinterpret_cast<type*>(name##_of)
#endif

namespace polyspec::cuda {

inline Result result_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return cuda_error(error);
}

// The error, if there is one, is this launch's own and is not left behind for the next caller of
// cudaGetLastError.
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), const cudaLaunchConfig_t& config,
                          const Args&... args) {
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace polyspec::cuda
