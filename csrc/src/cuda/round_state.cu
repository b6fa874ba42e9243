// State rows on CUDA: one thread per row. A row is a few dozen integers, so these kernels take as
// long as a launch, for any batch; they save a host synchronisation.
#include "core/schedule_row.hpp"
#include "cuda/round_state.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {
namespace {

constexpr int kThreads = 32;

__global__ void __launch_bounds__(kThreads)
    schedule_due_kernel(const __grid_constant__ ScheduleDueParams p) {
  begin_kernel();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row < p.in.batch) core::due_row(p, row);
}

__global__ void __launch_bounds__(kThreads)
    schedule_next_kernel(const __grid_constant__ ScheduleNextParams p) {
  begin_kernel();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row < p.in.batch) core::next_row(p, row);
}

__global__ void __launch_bounds__(kThreads)
    schedule_report_kernel(const __grid_constant__ ScheduleReportParams p) {
  begin_kernel();
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row < p.in.batch) core::report_row(p, row);
}

template <class Params>
Result launch(void (*kernel)(Params), const Params& params, CUstream_st* stream) {
  const int64_t blocks = (params.in.batch + kThreads - 1) / kThreads;
  if (blocks > 0x7fffffff)
    return {Result::Code::kInvalidArgument, "batch: expected fewer rows than 2^36, given more"};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return result_of(launch_kernel(kernel, config, params));
}

}  // namespace

Result schedule_due(const ScheduleDueParams& params, CUstream_st* stream) {
  return launch(schedule_due_kernel, params, stream);
}

Result schedule_next(const ScheduleNextParams& params, CUstream_st* stream) {
  return launch(schedule_next_kernel, params, stream);
}

Result schedule_report(const ScheduleReportParams& params, CUstream_st* stream) {
  return launch(schedule_report_kernel, params, stream);
}

}  // namespace polyspec::cuda
