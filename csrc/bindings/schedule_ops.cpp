// The operators of polyspec/round_state.hpp for torch's dispatcher, on the LibTorch stable ABI
// (target 2.11).
#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

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
                                                 int64_t level, int64_t width, int64_t most) {
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
  run<1>(&polyspec::schedule_next, params, place);
  return made;
}

std::tuple<Tensor, Tensor> schedule_report(const Tensor& state, int64_t levels, int64_t steps,
                                           int64_t level, const Tensor& plan, const Tensor& tokens,
                                           const OptTensor& counts, const Tensor& status,
                                           const Tensor& eos, int64_t padding) {
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
  params.padding = padding;
  std::tuple<Tensor, Tensor> made{
      empty(place, {batch, params.width}, aoti_torch_dtype_int64()),
      empty(place, {params.in.shape.levels, batch}, aoti_torch_dtype_int64())};
  params.slots = words(std::get<0>(made));
  params.kept = words(std::get<1>(made));
  run<1>(&polyspec::schedule_report, params, place);
  return made;
}

// Rows of a table [b, n, ...] that receive the rows of a block [b, w, ...]. Strides are of bytes.
struct RowCopy {
  const char* from;
  char* into;
  int64_t bytes, from_stride[2], into_stride[2];

  RowCopy(const Tensor& block, const Tensor& table, int64_t element)
      : from(static_cast<const char*>(block.const_data_ptr())),
        into(static_cast<char*>(table.mutable_data_ptr())),
        bytes(element * table.size(2)),
        from_stride{element * block.stride(0), element * block.stride(1)},
        into_stride{element * table.stride(0), element * table.stride(1)} {}

  void row(int64_t b, int64_t w, int64_t slot) const {
    std::memcpy(into + b * into_stride[0] + slot * into_stride[1],
                from + b * from_stride[0] + w * from_stride[1], static_cast<size_t>(bytes));
  }
};

// Rows that go to `padding`, which are most, are not copied.
void put_rows(Tensor table, OptTensor statistics, const Tensor& rows,
              const OptTensor& rows_statistics, const Tensor& slots, int64_t padding) {
  STD_TORCH_CHECK(table.dim() == 3, "table: expected shape [B, N, V], got ", shape_name(table));
  STD_TORCH_CHECK(slots.dim() == 2, "slots: expected shape [B, W], got ", shape_name(slots));
  const Place place(table);
  const int64_t batch = table.size(0), room = table.size(1), vocab = table.size(2);
  struct Work {
    std::vector<RowCopy> copies;
    const int64_t* slots;
    int64_t width, padding;
  } work{{}, nullptr, slots.size(1), padding};
  work.slots = integers<int64_t>(slots, "slots", place, {batch, work.width});
  const bool wide = float_type(table, "table") == polyspec::DType::kFloat32;
  expect(rows, "rows", place, {batch, work.width, vocab});
  expect_dtype(rows, "rows", dtype_of(table));
  expect_unit_stride(table, "table");
  expect_unit_stride(rows, "rows");
  work.copies.emplace_back(rows, table, wide ? sizeof(float) : sizeof(uint16_t));
  STD_TORCH_CHECK(statistics.has_value() == rows_statistics.has_value(),
                  "statistics: expected both or none, got one");
  if (statistics.has_value()) {
    integers<int64_t>(*statistics, "statistics", place, {batch, room, 2});
    expect(*rows_statistics, "rows_statistics", place, {batch, work.width, 2});
    expect_dtype(*rows_statistics, "rows_statistics", aoti_torch_dtype_int64());
    expect_unit_stride(*rows_statistics, "rows_statistics");
    work.copies.emplace_back(*rows_statistics, *statistics, sizeof(int64_t));
  }
  for (int64_t i = 0; i < batch * work.width; ++i) {
    const int64_t slot = work.slots[i];
    STD_TORCH_CHECK(slot == padding || (slot >= 0 && slot < room), "slots: expected 0 to ",
                    room - 1, ", got ", slot);
  }
  const auto range = [](int64_t begin, int64_t end, void* opaque) {
    const Work& mine = *static_cast<const Work*>(opaque);
    for (int64_t i = begin; i < end; ++i) {
      if (mine.slots[i] == mine.padding) continue;
      for (const RowCopy& copy : mine.copies) {
        copy.row(i / mine.width, i % mine.width, mine.slots[i]);
      }
    }
  };
  constexpr int64_t kGrain = 1 << 17;  // entries that are worth a separate thread
  const int64_t grain = 1 + kGrain / std::max<int64_t>(vocab, 1);
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, batch * work.width, grain, range, &work));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "schedule_next(Tensor state, int levels, int steps, int level, int width, int most) -> "
      "(Tensor input_ids, Tensor plan, Tensor pending)");
  m.def(
      "schedule_report(Tensor(a!) state, int levels, int steps, int level, Tensor plan, Tensor "
      "tokens, Tensor? counts, Tensor status, Tensor eos, int padding) -> (Tensor slots, Tensor "
      "kept)");
  m.def(
      "put_rows(Tensor(a!) table, Tensor(b!)? statistics, Tensor rows, Tensor? rows_statistics, "
      "Tensor slots, int padding) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("put_rows", TORCH_BOX(&put_rows));
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("schedule_next", TORCH_BOX(&schedule_next));
  m.impl("schedule_report", TORCH_BOX(&schedule_report));
}
