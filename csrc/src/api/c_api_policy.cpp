// The C interface of the window policies: struct sizes, codes and texts; nothing is computed here.
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "api/c_errors.hpp"
#include "api/c_fields.hpp"
#include "polyspec/policy.hpp"

struct polyspec_policy {
  std::unique_ptr<polyspec::WindowPolicy> chooser;
  std::vector<polyspec::StepReport> steps;  // room for a report
};

namespace {

using polyspec::c_api::guarded;
using polyspec::c_api::read_struct;
using polyspec::c_api::require;
using polyspec::c_api::require_windows;

// By hand: the three of the windows.
// clang-format off
#define POLICY_FIELDS(F)                                                       \
  F(kind) F(history) F(max_acceptance) F(forgetting) F(ngram) F(learning_rate) \
  F(discount) F(exploration) F(seed) F(guard) F(guard_loss) F(guard_hold) \
  F(guard_share)
// clang-format on
POLYSPEC_COPY(polyspec_policy_options, PolicyOptions, 4, POLICY_FIELDS)

#define STEP_FIELDS(F) F(level) F(repeated) F(tokens) F(accepted) F(width) F(batch) F(seconds)
POLYSPEC_COPY(polyspec_step_report, StepReport, 0, STEP_FIELDS)

#define ROUND_FIELDS(F) F(row) F(begins) F(num_steps) F(tokens) F(num_tokens) F(batch)
POLYSPEC_COPY(polyspec_round_report, RoundReport, 2, ROUND_FIELDS)

void require_at_least(int64_t given, int64_t least, const char* name) {
  if (given >= least) return;
  throw std::invalid_argument(std::string(name) + ": expected >= " + std::to_string(least) +
                              ", given " + std::to_string(given));
}

polyspec::PolicyOptions options_of(const polyspec_policy_options& in) {
  polyspec::PolicyOptions out;
  require_at_least(in.num_windows, 1, "num_windows");
  require(in.windows, "windows");
  copy(in, &out);
  out.windows.assign(in.windows, in.windows + in.num_windows);
  if (in.max_windows != nullptr) {
    out.max_windows.assign(in.max_windows, in.max_windows + in.num_windows);
  }
  return out;
}

}  // namespace

polyspec_code polyspec_policy_create(const polyspec_policy_options* options,
                                     polyspec_policy** policy) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    require(policy, "policy");
    *policy = nullptr;
    polyspec_policy_options read = polyspec_policy_options_default();
    const polyspec_code code = read_struct(function, options, {}, &read);
    if (code != POLYSPEC_OK) return code;
    *policy = new polyspec_policy{polyspec::make_policy(options_of(read)), {}};
    return POLYSPEC_OK;
  });
}

void polyspec_policy_destroy(polyspec_policy* policy) { delete policy; }

polyspec_code polyspec_policy_reset(polyspec_policy* policy) {
  return guarded(__func__, [&] {
    require(policy, "policy");
    policy->chooser->reset();
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_policy_forget_row(polyspec_policy* policy, int64_t row) {
  return guarded(__func__, [&] {
    require(policy, "policy");
    policy->chooser->forget_row(row);
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_policy_next(polyspec_policy* policy, const polyspec_round_report* report,
                                   int64_t* windows, int32_t num_windows) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    require(policy, "policy");
    require(windows, "windows");
    require_windows(num_windows, policy->chooser->levels() - 1);
    polyspec_round_report given = polyspec_round_report_default();
    const size_t without_batch = offsetof(polyspec_round_report, batch);
    const polyspec_code code = read_struct(function, report, {without_batch}, &given);
    if (code != POLYSPEC_OK) return code;
    require_at_least(given.num_steps, 0, "num_steps");
    require_at_least(given.num_tokens, 0, "num_tokens");
    if (given.num_steps > 0) require(given.steps, "steps");
    if (given.num_tokens > 0) require(given.tokens, "tokens");
    policy->steps.clear();
    for (int64_t i = 0; i < given.num_steps; ++i) {
      policy->steps.emplace_back();
      copy(given.steps[i], &policy->steps.back());
    }
    polyspec::RoundReport read;
    copy(given, &read);
    read.steps = policy->steps.data();
    policy->chooser->next(read, windows);
    return POLYSPEC_OK;
  });
}
