// The operators of polyspec/round_state.hpp: check what the host can see, then hand over to the
// backend. On the CPU a row is a few dozen integers: no thread is worth waking.
#include "polyspec/round_state.hpp"

#include "api/checks.hpp"
#include "core/schedule_row.hpp"
#include "cuda/round_state.hpp"

namespace polyspec {
namespace {

constexpr int32_t kMaxLevels = (1 << 16) - 1;  // the level is part of the draws' key

Result check(const RoundParams& p) {
  if (p.shape.levels < 2 || p.shape.levels > kMaxLevels)
    return invalid("levels must be in [2, 2^16)");
  if (p.shape.steps < 0 || p.shape.capacity < 0) return invalid("steps and capacity must be >= 0");
  if (p.batch < 0) return invalid("batch must be >= 0");
  if (p.batch > 0 && p.state == nullptr) return invalid("state must not be null");
  return {};
}

Result check(const RoundParams& p, int32_t level, int64_t width) {
  const Result result = check(p);
  if (!result.ok()) return result;
  if (level < 1 || level > p.shape.levels) return invalid("level must be in [1, levels]");
  if (width < 1) return invalid("width must be >= 1");
  return {};
}

}  // namespace

Result schedule_due(const ScheduleDueParams& params, Stream stream) {
  const Result result = check(params.in);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.due == nullptr) return invalid("due must not be null");
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_due(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::due_row(params, row);
  return {};
}

Result schedule_next(const ScheduleNextParams& params, Stream stream) {
  const Result result = check(params.in, params.level, params.width);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.input_ids == nullptr || params.plan == nullptr)
    return invalid("input_ids and plan must not be null");
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_next(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::next_row(params, row);
  return {};
}

Result schedule_report(const ScheduleReportParams& params, Stream stream) {
  const Result result = check(params.in, params.level, params.width);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.num_eos < 0) return invalid("num_eos must be >= 0");
  if (params.plan == nullptr || params.tokens == nullptr || params.status == nullptr ||
      params.slots == nullptr || (params.num_eos > 0 && params.eos == nullptr)) {
    return invalid("plan, tokens, status, eos and slots must not be null");
  }
  if (params.counts == nullptr && params.level != params.in.shape.levels)
    return invalid("counts must be given for a verification");
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_report(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::report_row(params, row);
  return {};
}

}  // namespace polyspec
