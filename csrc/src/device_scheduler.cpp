// The operators of polyspec/device_scheduler.hpp: check what the host can see, then hand over to
// the backend. On the CPU a row is a few dozen integers: no thread is worth waking.
#include "polyspec/device_scheduler.hpp"

#include "cuda/device_scheduler.hpp"
#include "polyspec/detail/schedule_row.hpp"

namespace polyspec {
namespace {

Result invalid(const char* message) { return {Result::Code::kInvalidArgument, message}; }

Result check(const ScheduleParams& p) {
  const ScheduleShape& shape = p.shape;
  if (shape.levels < 2 || shape.levels > ScheduleShape::kMaxLevels)
    return invalid("levels must be in [2, 16]");
  if (shape.tail < 1 || shape.steps < 0) return invalid("tail must be >= 1 and steps >= 0");
  if (p.batch < 0) return invalid("batch must be >= 0");
  if (p.level < 1 || p.level > shape.levels) return invalid("level must be in [1, levels]");
  for (int32_t i = 0; i + 1 < shape.levels; ++i) {
    if (p.windows[i] < 0 || p.rounds[i] < 0) return invalid("windows and rounds must be >= 0");
  }
  if (p.batch > 0 && p.state == nullptr) return invalid("state must not be null");
  return {};
}

}  // namespace

Result schedule_next(const ScheduleNextParams& params, Stream stream) {
  const Result result = check(params.in);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.width < 1) return invalid("width must be >= 1");
  if (params.fed == nullptr || params.plan == nullptr)
    return invalid("fed and plan must not be null");
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_next(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) detail::next_row(params, row);
  return {};
}

Result schedule_report(const ScheduleReportParams& params, Stream stream) {
  const Result result = check(params.in);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.width < 1 || params.num_eos < 0) return invalid("width must be >= 1 and num_eos >= 0");
  if (params.plan == nullptr || params.tokens == nullptr || params.status == nullptr ||
      params.place == nullptr || (params.num_eos > 0 && params.eos == nullptr)) {
    return invalid("plan, tokens, status, eos and place must not be null");
  }
  if ((params.accepted == nullptr) != (params.in.level == params.in.shape.levels))
    return invalid("accepted must be given for a verification, and not for a draft");
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_report(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) detail::report_row(params, row);
  return {};
}

}  // namespace polyspec
