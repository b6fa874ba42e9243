// The CUDA sources' interface to the CUDA runtime and language, so that csrc/tests/cuda_on_cpu can
// replace both: shared memory by name, and launches that know their kernel's parameters.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

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

// Dependent launch (sm_90): a kernel may begin when all CTAs of the kernel before it in its stream
// have called launch_dependents or ended. Until wait_for_prerequisites returns it touches nothing
// that an earlier kernel reads or writes, tickets and workspaces included; then all earlier kernels
// have ended, since each of them has waited for the kernels before it. Every kernel that
// launch_kernel launches waits, in all of its threads.
__device__ __forceinline__ void launch_dependents() {
#ifndef __CUDACC__
  stand_in::launch_dependents();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_prerequisites() {
#ifndef __CUDACC__
  stand_in::wait_for_prerequisites();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A hint that this is read after the wait: another kernel may still write it.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDACC__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}
// The same of `bytes`, a multiple of 16 as the address is.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* address,
                                         [[maybe_unused]] unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(__CUDACC__)
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}
// Of a kernel that has nothing to do before it waits.
__device__ __forceinline__ void begin_kernel() {
  launch_dependents();
  wait_for_prerequisites();
}

// Whether kernels of this stream are launched so: on devices that can, in captures. A graph begins
// when the stream's earlier work has ended, so that weights which no kernel of the graph writes can
// be read before the wait. POLYSPEC_DEPENDENT_LAUNCH=0 in the environment turns it off.
bool is_dependent(CUstream_st* stream);

// The only function that launches kernels. The error, if any, is this launch's and is not left for
// the next caller of cudaGetLastError.
template <class... Params, class... Args>
cudaError_t launch_kernel(void (*kernel)(Params...), cudaLaunchConfig_t config,
                          const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  if (is_dependent(config.stream)) {
    std::copy_n(config.attrs, config.numAttrs, attributes);
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace polyspec::cuda
