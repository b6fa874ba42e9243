// The C interface of the scheduler: struct sizes, codes and texts; nothing is computed here.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "api/c_errors.hpp"
#include "polyspec/scheduler.hpp"

struct polyspec_scheduler {
  explicit polyspec_scheduler(std::vector<int64_t> windows, std::vector<int64_t> rounds = {})
      : machine(std::move(windows), std::move(rounds)) {}
  polyspec::Scheduler machine;
};

namespace {

using polyspec::c_api::check_size;
using polyspec::c_api::guarded;
using polyspec::c_api::require;
using polyspec::c_api::require_windows;

static_assert(POLYSPEC_STEP_DONE == static_cast<int>(polyspec::Step::Kind::kDone), "step");

// The result of `ask`, or -1 with an explanation.
template <class Ask>
int64_t answer(const char* function, const polyspec_scheduler* scheduler, const Ask& ask) {
  int64_t found = -1;
  guarded(function, [&] {
    require(scheduler, "scheduler");
    found = static_cast<int64_t>(ask(scheduler->machine));
    return POLYSPEC_OK;
  });
  return found;
}

std::vector<int64_t> read_windows(const int64_t* windows, int32_t num_windows) {
  require(windows, "windows");
  if (num_windows < 1) {
    throw std::invalid_argument("num_windows: expected >= 1, given " + std::to_string(num_windows));
  }
  return std::vector<int64_t>(windows, windows + num_windows);
}

}  // namespace

polyspec_code polyspec_scheduler_create(const int64_t* windows, int32_t num_windows,
                                        polyspec_scheduler** scheduler) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    *scheduler = nullptr;
    *scheduler = new polyspec_scheduler(read_windows(windows, num_windows));
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_create_bounded(const int64_t* windows, const int64_t* rounds,
                                                int32_t num_windows,
                                                polyspec_scheduler** scheduler) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    *scheduler = nullptr;
    std::vector<int64_t> read = read_windows(windows, num_windows);
    require(rounds, "rounds");
    *scheduler =
        new polyspec_scheduler(std::move(read), std::vector<int64_t>(rounds, rounds + num_windows));
    return POLYSPEC_OK;
  });
}

void polyspec_scheduler_destroy(polyspec_scheduler* scheduler) { delete scheduler; }

polyspec_code polyspec_scheduler_start(polyspec_scheduler* scheduler, int64_t max_new_tokens) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    scheduler->machine.start(max_new_tokens);
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_next(const polyspec_scheduler* scheduler, polyspec_step* step) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    require(scheduler, "scheduler");
    const polyspec_code code = check_size(function, step, {POLYSPEC_STEP_WITHOUT_TAIL_SIZE});
    if (code != POLYSPEC_OK) return code;
    const polyspec::Step next = scheduler->machine.next();
    const polyspec_step made = {step->struct_size, static_cast<int32_t>(next.kind), next.level,
                                next.count, next.of_tail};
    std::memcpy(step, &made, std::min(step->struct_size, sizeof made));
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_report(polyspec_scheduler* scheduler, int32_t level,
                                        int64_t emitted, int32_t eos) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    scheduler->machine.report(level, emitted, eos != 0);
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_set_windows(polyspec_scheduler* scheduler, const int64_t* windows,
                                             int32_t num_windows) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    scheduler->machine.set_windows(read_windows(windows, num_windows));
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_set_tail(polyspec_scheduler* scheduler, int64_t tail) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    scheduler->machine.set_tail(tail);
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_scheduler_get_windows(const polyspec_scheduler* scheduler, int64_t* windows,
                                             int32_t num_windows) {
  return guarded(__func__, [&] {
    require(scheduler, "scheduler");
    require(windows, "windows");
    const std::vector<int64_t>& held = scheduler->machine.windows();
    require_windows(num_windows, static_cast<int64_t>(held.size()));
    std::copy(held.begin(), held.end(), windows);
    return POLYSPEC_OK;
  });
}

int64_t polyspec_scheduler_pending(const polyspec_scheduler* scheduler, int32_t level) {
  return answer(__func__, scheduler,
                [level](const polyspec::Scheduler& machine) { return machine.pending(level); });
}

int64_t polyspec_scheduler_committed(const polyspec_scheduler* scheduler) {
  return answer(__func__, scheduler,
                [](const polyspec::Scheduler& machine) { return machine.committed(); });
}

int32_t polyspec_scheduler_done(const polyspec_scheduler* scheduler) {
  return static_cast<int32_t>(answer(
      __func__, scheduler, [](const polyspec::Scheduler& machine) { return machine.done(); }));
}

int32_t polyspec_scheduler_levels(const polyspec_scheduler* scheduler) {
  return static_cast<int32_t>(answer(
      __func__, scheduler, [](const polyspec::Scheduler& machine) { return machine.levels(); }));
}

int64_t polyspec_scheduler_tail(const polyspec_scheduler* scheduler) {
  return answer(__func__, scheduler,
                [](const polyspec::Scheduler& machine) { return machine.tail(); });
}
