// The CUDA backend of polyspec/round_state.hpp.
#pragma once

#include "polyspec/round_state.hpp"

namespace polyspec::cuda {

// Arguments are checked already (round_state.cpp). Each is one launch on the stream.
Result schedule_due(const ScheduleDueParams& params, CUstream_st* stream);
Result schedule_next(const ScheduleNextParams& params, CUstream_st* stream);
Result schedule_report(const ScheduleReportParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
