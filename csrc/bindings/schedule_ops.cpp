// The operators of polyspec/round_state.hpp for torch's dispatcher, on the LibTorch stable ABI
// (target 2.11).
#include <tuple>

#include "polyspec/round_state.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

// The state rows [B, words]; the rest of their width is the text's.
polyspec::RoundParams rounds(const Tensor& state, int64_t levels, int64_t steps) {
  STD_TORCH_CHECK(levels >= 2 && levels < 65536, "levels: expected 2 to 65535, got ", levels);
  STD_TORCH_CHECK(steps >= 0, "steps: expected >= 0, got ", steps);
  STD_TORCH_CHECK(state.dim() == 2, "state: expected 2 dimensions, got ", state.dim());
  polyspec::RoundParams params;
  params.shape.levels = static_cast<int32_t>(levels);
  params.shape.steps = steps;
  params.shape.capacity = state.size(1) - params.shape.text_at();
  STD_TORCH_CHECK(params.shape.capacity >= 0, "state: expected at least ", params.shape.text_at(),
                  " columns, got ", state.size(1));
  params.batch = state.size(0);
  params.state =
      integers<int64_t>(state, "state", Place(state), {params.batch, params.shape.words()});
  return params;
}

int32_t level_of(const polyspec::RoundParams& params, int64_t level) {
  STD_TORCH_CHECK(level >= 1 && level <= params.shape.levels, "level: expected 1 to ",
                  params.shape.levels, ", got ", level);
  return static_cast<int32_t>(level);
}

int64_t* words(const Tensor& tensor) { return static_cast<int64_t*>(tensor.mutable_data_ptr()); }

std::tuple<Tensor, Tensor, Tensor> schedule_next(const Tensor& state, int64_t levels, int64_t steps,
                                                 int64_t level, int64_t width, int64_t most,
                                                 const OptTensor& unread) {
  polyspec::ScheduleNextParams params;
  params.in = rounds(state, levels, steps);
  params.level = level_of(params.in, level);
  params.width = width;
  params.most = most;
  STD_TORCH_CHECK(width >= 1, "width: expected >= 1, got ", width);
  STD_TORCH_CHECK(most >= 0, "most: expected >= 0, got ", most);
  const Place place(state);
  std::tuple<Tensor, Tensor, Tensor> made{
      empty(place, {params.in.batch, width}, aoti_torch_dtype_int64()),
      empty(place, {polyspec::kPlanRows, params.in.batch}, aoti_torch_dtype_int64()),
      empty(place, {params.in.batch, most}, aoti_torch_dtype_int64())};
  params.input_ids = words(std::get<0>(made));
  params.plan = words(std::get<1>(made));
  params.pending = words(std::get<2>(made));
  params.unread = integers(unread, "unread", place, {params.in.batch});
  run<1>(&polyspec::schedule_next, params, place);
  return made;
}

std::tuple<Tensor, Tensor> schedule_report(const Tensor& state, int64_t levels, int64_t steps,
                                           int64_t level, const Tensor& plan, const Tensor& tokens,
                                           const OptTensor& counts, const Tensor& status,
                                           const Tensor& eos) {
  polyspec::ScheduleReportParams params;
  params.in = rounds(state, levels, steps);
  params.level = level_of(params.in, level);
  const Place place(state);
  const int64_t batch = params.in.batch;
  STD_TORCH_CHECK(tokens.dim() == 2, "tokens: expected 2 dimensions, got ", tokens.dim());
  STD_TORCH_CHECK(eos.dim() == 2, "eos: expected 2 dimensions, got ", eos.dim());
  params.width = tokens.size(1);
  params.num_eos = eos.size(1);
  params.plan = integers<int64_t>(plan, "plan", place, {polyspec::kPlanRows, batch});
  params.tokens = integers<int64_t>(tokens, "tokens", place, {batch, params.width});
  params.eos = integers<int64_t>(eos, "eos", place, {batch, params.num_eos});
  if (counts.has_value()) params.counts = integers<int64_t>(*counts, "counts", place, {batch});
  if (params.level < params.in.shape.levels) {
    params.status = integers<int32_t>(status, "status", place, {batch});
  } else {
    params.status = integers<int32_t>(status, "status", place, {batch, params.width});
  }
  std::tuple<Tensor, Tensor> made{
      empty(place, {2, batch}, aoti_torch_dtype_int64()),
      empty(place, {params.in.shape.levels, batch}, aoti_torch_dtype_int64())};
  params.appended = words(std::get<0>(made));
  params.kept = words(std::get<1>(made));
  run<1>(&polyspec::schedule_report, params, place);
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "schedule_next(Tensor state, int levels, int steps, int level, int width, int most, "
      "Tensor? unread=None) -> "
      "(Tensor input_ids, Tensor plan, Tensor pending)");
  m.def(
      "schedule_report(Tensor(a!) state, int levels, int steps, int level, Tensor plan, Tensor "
      "tokens, Tensor? counts, Tensor status, Tensor eos) -> (Tensor appended, Tensor kept)");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}
