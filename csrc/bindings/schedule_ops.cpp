// The operators of polyspec/device_scheduler.hpp for torch's dispatcher, on the LibTorch stable ABI
// (target 2.11).
#include <algorithm>
#include <tuple>
#include <vector>

#include "polyspec/device_scheduler.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;
using polyspec::ScheduleShape;

polyspec::ScheduleParams schedule(const Tensor& state, const std::vector<int64_t>& windows,
                                  const std::vector<int64_t>& rounds, int64_t tail, int64_t steps,
                                  int64_t level) {
  const int64_t count = static_cast<int64_t>(windows.size());
  STD_TORCH_CHECK(
      count >= 1 && count < ScheduleShape::kMaxLevels && rounds.size() == windows.size(),
      "windows, rounds: expected as many of each, 1 to ", ScheduleShape::kMaxLevels - 1, "; got ",
      windows.size(), " and ", rounds.size());
  STD_TORCH_CHECK(level >= 1 && level <= count + 1, "level: expected 1 to ", count + 1, ", got ",
                  level);
  polyspec::ScheduleParams params;
  params.shape.levels = static_cast<int32_t>(count + 1);
  params.shape.tail = tail;
  params.shape.steps = steps;
  std::copy(windows.begin(), windows.end(), params.windows);
  std::copy(rounds.begin(), rounds.end(), params.rounds);
  params.level = static_cast<int32_t>(level);
  STD_TORCH_CHECK(state.dim() == 2, "state: expected 2 dimensions, got ", state.dim());
  params.batch = state.size(0);
  params.state =
      integers<int64_t>(state, "state", Place(state), {params.batch, params.shape.words()});
  return params;
}

std::tuple<Tensor, Tensor> schedule_next(const Tensor& state, std::vector<int64_t> windows,
                                         std::vector<int64_t> rounds, int64_t tail, int64_t steps,
                                         int64_t level, int64_t width) {
  polyspec::ScheduleNextParams params;
  params.in = schedule(state, windows, rounds, tail, steps, level);
  params.width = width;
  STD_TORCH_CHECK(width >= 1, "width: expected >= 1, got ", width);
  const Place place(state);
  std::tuple<Tensor, Tensor> made{
      empty(place, {params.in.batch, width}, aoti_torch_dtype_int64()),
      empty(place, {polyspec::kPlanRows, params.in.batch}, aoti_torch_dtype_int64())};
  params.fed = static_cast<int64_t*>(std::get<0>(made).mutable_data_ptr());
  params.plan = static_cast<int64_t*>(std::get<1>(made).mutable_data_ptr());
  run<1>(&polyspec::schedule_next, params, place);
  return made;
}

std::tuple<Tensor, Tensor> schedule_report(const Tensor& state, std::vector<int64_t> windows,
                                           std::vector<int64_t> rounds, int64_t tail, int64_t steps,
                                           int64_t level, const Tensor& plan, const Tensor& tokens,
                                           const OptTensor& accepted, const Tensor& status,
                                           const Tensor& eos, int64_t nowhere) {
  polyspec::ScheduleReportParams params;
  params.in = schedule(state, windows, rounds, tail, steps, level);
  const Place place(state);
  const int64_t batch = params.in.batch;
  STD_TORCH_CHECK(tokens.dim() == 2, "tokens: expected 2 dimensions, got ", tokens.dim());
  STD_TORCH_CHECK(eos.dim() == 2, "eos: expected 2 dimensions, got ", eos.dim());
  params.width = tokens.size(1);
  params.num_eos = eos.size(1);
  params.plan = integers<int64_t>(plan, "plan", place, {polyspec::kPlanRows, batch});
  params.tokens = integers<int64_t>(tokens, "tokens", place, {batch, params.width});
  params.eos = integers<int64_t>(eos, "eos", place, {batch, params.num_eos});
  if (accepted.has_value()) {
    params.accepted = integers<int64_t>(*accepted, "accepted", place, {batch});
    params.status = integers<int32_t>(status, "status", place, {batch});
  } else {
    params.status = integers<int32_t>(status, "status", place, {batch, params.width});
  }
  params.nowhere = nowhere;
  std::tuple<Tensor, Tensor> made{
      empty(place, {batch, params.width}, aoti_torch_dtype_int64()),
      empty(place, {params.in.shape.levels, batch}, aoti_torch_dtype_int64())};
  params.place = static_cast<int64_t*>(std::get<0>(made).mutable_data_ptr());
  params.lengths = static_cast<int64_t*>(std::get<1>(made).mutable_data_ptr());
  run<1>(&polyspec::schedule_report, params, place);
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "schedule_next(Tensor state, int[] windows, int[] rounds, int tail, int steps, int level, "
      "int width) -> (Tensor fed, Tensor plan)");
  m.def(
      "schedule_report(Tensor(a!) state, int[] windows, int[] rounds, int tail, int steps, int "
      "level, Tensor plan, Tensor tokens, Tensor? accepted, Tensor status, Tensor eos, int "
      "nowhere) -> (Tensor place, Tensor lengths)");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}
