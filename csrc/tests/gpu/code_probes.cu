// The kernels of the operators for one type of logits. Nothing runs them:
// python_tests/ops/test_code_budget.py compiles them and counts their code.
#include "cuda/kernels.cuh"

namespace polyspec::cuda {

using T = core::BFloat16;
template __global__ void verify_kernel<T, Rule::kToken, kVerifyThreads>(
    const __grid_constant__ VerifyParams);
template __global__ void rows_kernel<T, Rule::kToken, kVerifyThreads>(
    const __grid_constant__ VerifyParams);
template __global__ void verify_kernel<T, Rule::kBlock, kResidualThreads>(
    const __grid_constant__ VerifyParams);
template __global__ void rows_kernel<T, Rule::kBlock, kResidualThreads>(
    const __grid_constant__ VerifyParams);
template __global__ void tree_kernel<T, kResidualThreads>(const __grid_constant__ VerifyTreeParams);
template __global__ void sample_kernel<T, kSampleThreads>(const __grid_constant__ SampleParams);

}  // namespace polyspec::cuda
