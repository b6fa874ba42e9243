// The operators of polyspec/round_state.hpp: check arguments on the host, then call the backend. On
// the CPU a row has a few dozen integers: no thread is worth waking.
#include "polyspec/round_state.hpp"

#include "api/checks.hpp"
#include "core/schedule_row.hpp"
#include "cuda/round_state.hpp"

namespace polyspec {
namespace {

constexpr int32_t kMaxLevels = (1 << 16) - 1;  // the level is part of the draws' key

Result check(const RoundParams& p) {
  if (p.shape.levels < 2 || p.shape.levels > kMaxLevels)
    return expected("levels", "[2, 2^16)", p.shape.levels);
  if (p.shape.steps < 0) return expected("steps", ">= 0", p.shape.steps);
  if (p.shape.capacity < 0) return expected("capacity", ">= 0", p.shape.capacity);
  if (p.batch < 0) return expected("batch", ">= 0", p.batch);
  if (const Result log = check_sizes("steps", {p.shape.steps, RoundShape::kPerStep}); !log.ok())
    return log;
  if (const Result text = check_sizes("capacity", {p.shape.capacity}); !text.ok()) return text;
  const Result rows = check_sizes("batch, levels, steps, capacity", {p.batch, p.shape.words()});
  if (!rows.ok()) return rows;
  return check_given({{"state", p.state, p.batch > 0}});
}

Result check(const RoundParams& p, int32_t level, int64_t width) {
  const Result result = check(p);
  if (!result.ok()) return result;
  if (level < 1 || level > p.shape.levels) return expected("level", "[1, levels]", level);
  if (width < 1) return expected("width", ">= 1", width);
  return check_sizes("batch, width", {p.batch, width});
}

}  // namespace

Result schedule_due(const ScheduleDueParams& params, Stream stream) {
  const Result result = check(params.in);
  if (!result.ok() || params.in.batch == 0) return result;
  if (const Result given = check_given({{"due", params.due}}); !given.ok()) return given;
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_due(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::due_row(params, row);
  return {};
}

Result schedule_next(const ScheduleNextParams& params, Stream stream) {
  const Result result = check(params.in, params.level, params.width);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.most < 0) return expected("most", ">= 0", params.most);
  const Result most = check_sizes("batch, most", {params.in.batch, params.most});
  if (!most.ok()) return most;
  const Result given = check_given({{"input_ids", params.input_ids},
                                    {"plan", params.plan},
                                    {"pending", params.pending, params.most > 0}});
  if (!given.ok()) return given;
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_next(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::next_row(params, row);
  return {};
}

Result schedule_report(const ScheduleReportParams& params, Stream stream) {
  const Result result = check(params.in, params.level, params.width);
  if (!result.ok() || params.in.batch == 0) return result;
  if (params.num_eos < 0) return expected("num_eos", ">= 0", params.num_eos);
  const Result eos = check_sizes("batch, num_eos", {params.in.batch, params.num_eos});
  if (!eos.ok()) return eos;
  const bool verifies = params.level != params.in.shape.levels;
  const Result given = check_given({{"plan", params.plan},
                                    {"tokens", params.tokens},
                                    {"counts", params.counts, verifies},
                                    {"status", params.status},
                                    {"eos", params.eos, params.num_eos > 0},
                                    {"appended", params.appended}});
  if (!given.ok()) return given;
  if (stream.device == Stream::Device::kCuda) return cuda::schedule_report(params, stream.cuda);
  for (int64_t row = 0; row < params.in.batch; ++row) core::report_row(params, row);
  return {};
}

}  // namespace polyspec
