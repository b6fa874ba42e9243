// The C interface of the state rows of a batch: struct sizes and codes; nothing is computed here.
#include "api/c_calls.hpp"
#include "api/c_fields.hpp"
#include "polyspec/round_state.hpp"

namespace {

using polyspec::RoundShape;
using polyspec::c_api::call;
using polyspec::c_api::read_struct;

#define SHAPE(F) F(levels) F(steps) F(capacity)
#define ROWS(F) F(batch) F(state)
template <class To>
void copy_shape(const polyspec_round& in, To* to) {
  static_assert(polyspec::c_api::count_fields<polyspec_round>() == 1 SHAPE(POLYSPEC_COUNT)
                                                                       ROWS(POLYSPEC_COUNT),
                "a field of polyspec_round is not copied");
  SHAPE(POLYSPEC_FIELD)
}
void copy(const polyspec_round& in, polyspec::RoundParams* to) {
  ROWS(POLYSPEC_FIELD)
  copy_shape(in, &to->shape);
}

#define DUE(F) F(due)
POLYSPEC_COPY(polyspec_schedule_due_params, ScheduleDueParams, 2, DUE)
#define NEXT(F) F(level) F(width) F(input_ids) F(plan) F(most) F(pending)
POLYSPEC_COPY(polyspec_schedule_next_params, ScheduleNextParams, 2, NEXT)
// clang-format off
#define REPORT(F)                                                                    \
  F(level) F(plan) F(width) F(tokens) F(counts) F(status) F(num_eos) F(eos) F(appended) \
  F(kept)
// clang-format on
POLYSPEC_COPY(polyspec_schedule_report_params, ScheduleReportParams, 2, REPORT)

static_assert(POLYSPEC_ROUND_TAIL_PENDING == int{RoundShape::kTailPending}, "header");
static_assert(POLYSPEC_ROUND_HEADER_WORDS == int{RoundShape::kHeader}, "header");
static_assert(POLYSPEC_ROUND_CLOSED == int{RoundShape::kClosed}, "level");
static_assert(POLYSPEC_ROUND_LEVEL_WORDS == int{RoundShape::kPerLevel}, "level");
static_assert(POLYSPEC_ROUND_OF_TAIL == int{RoundShape::kOfTail}, "log");
static_assert(POLYSPEC_ROUND_STEP_WORDS == int{RoundShape::kPerStep}, "log");
static_assert(POLYSPEC_PLAN_OF_TAIL == int{polyspec::kPlanOfTail}, "plan");
static_assert(POLYSPEC_PLAN_ROWS == int{polyspec::kPlanRows}, "plan");

constexpr auto read = [](const char* function, const auto& in, auto* to) {
  polyspec_round round = polyspec_round_default();
  const polyspec_code code = read_struct(function, in.in, {}, &round);
  if (code != POLYSPEC_OK) return code;
  copy(round, &to->in);
  copy(in, to);
  return polyspec_code{POLYSPEC_OK};
};

}  // namespace

polyspec_code polyspec_schedule_due(const polyspec_schedule_due_params* params,
                                    const polyspec_stream* stream) {
  return call(__func__, &polyspec::schedule_due, params, polyspec_schedule_due_params_default(), {},
              stream, read);
}

polyspec_code polyspec_schedule_next(const polyspec_schedule_next_params* params,
                                     const polyspec_stream* stream) {
  return call(__func__, &polyspec::schedule_next, params, polyspec_schedule_next_params_default(),
              {}, stream, read);
}

polyspec_code polyspec_schedule_report(const polyspec_schedule_report_params* params,
                                       const polyspec_stream* stream) {
  return call(__func__, &polyspec::schedule_report, params,
              polyspec_schedule_report_params_default(), {}, stream, read);
}
