// The CUDA backend behind polyspec/device_scheduler.hpp.
#pragma once

#include "polyspec/device_scheduler.hpp"

namespace polyspec::cuda {

// Arguments are checked already (device_scheduler.cpp). Each is one launch on the stream.
Result schedule_next(const ScheduleNextParams& params, CUstream_st* stream);
Result schedule_report(const ScheduleReportParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
