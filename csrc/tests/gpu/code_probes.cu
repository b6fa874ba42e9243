// The kernels of the operators for one type of logits. Nothing runs them:
// python_tests/ops/test_code_budget.py compiles them and counts their code.
#include "cuda/paths_kernel.cuh"

namespace polyspec::cuda {

using T = core::BFloat16;

#define VERIFY(kernel, rule, requests, threads)                                \
  template __global__ void kernel<T, Rule::rule, Requests::requests, threads>( \
      const __grid_constant__ VerifyParams);
#define BY_TOKEN(requests)                                \
  VERIFY(verify_kernel, kToken, requests, kVerifyThreads) \
  VERIFY(rows_kernel, kToken, requests, kVerifyThreads)
#define BY_BLOCK(requests)                                  \
  VERIFY(verify_kernel, kBlock, requests, kResidualThreads) \
  VERIFY(rows_kernel, kBlock, requests, kResidualThreads)
#define TREES_BY_BLOCK(requests)                                                  \
  template __global__ void paths_kernel<T, Requests::requests, kResidualThreads>( \
      const __grid_constant__ VerifyTreeParams);
#define OTHERS(requests)                                                         \
  template __global__ void tree_kernel<T, Requests::requests, kResidualThreads>( \
      const __grid_constant__ VerifyTreeParams);                                 \
  template __global__ void sample_kernel<T, Requests::requests, kSampleThreads>( \
      const __grid_constant__ SampleParams);

BY_TOKEN(kAny)
BY_TOKEN(kUnfiltered)
BY_TOKEN(kGreedy)
BY_BLOCK(kAny)
BY_BLOCK(kUnfiltered)
TREES_BY_BLOCK(kAny)
TREES_BY_BLOCK(kUnfiltered)
OTHERS(kAny)
OTHERS(kUnfiltered)
OTHERS(kGreedy)

}  // namespace polyspec::cuda
