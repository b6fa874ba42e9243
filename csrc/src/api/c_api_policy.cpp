// The C interface of the window policies: struct sizes, codes and texts; nothing is computed here.
#include <memory>
#include <utility>
#include <vector>

#include "api/c_errors.hpp"
#include "polyspec/policy.hpp"

struct polyspec_policy {
  std::unique_ptr<polyspec::WindowPolicy> chooser;
  std::vector<polyspec::StepReport> steps;  // room for a report
};

namespace {

using polyspec::c_api::check_size;
using polyspec::c_api::guarded;
using polyspec::c_api::read_struct;
using polyspec::c_api::require;

polyspec::PolicyOptions options_of(const polyspec_policy_options& in) {
  polyspec::PolicyOptions out;
  if (in.num_windows < 1) throw std::invalid_argument("num_windows: expected >= 1");
  require(in.windows, "windows is NULL");
  out.kind = static_cast<polyspec::PolicyKind>(in.kind);
  out.windows.assign(in.windows, in.windows + in.num_windows);
  if (in.max_windows != nullptr) {
    out.max_windows.assign(in.max_windows, in.max_windows + in.num_windows);
  }
  out.history = in.history;
  out.max_acceptance = in.max_acceptance;
  out.forgetting = in.forgetting;
  out.ngram = in.ngram;
  out.learning_rate = in.learning_rate;
  out.discount = in.discount;
  out.exploration = in.exploration;
  out.seed = in.seed;
  out.guard = in.guard != 0;
  out.guard_loss = in.guard_loss;
  out.guard_hold = in.guard_hold;
  return out;
}

}  // namespace

polyspec_code polyspec_policy_create(const polyspec_policy_options* options,
                                     polyspec_policy** policy) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    require(policy, "the address for the policy is NULL");
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
    require(policy, "the policy is NULL");
    policy->chooser->reset();
    return POLYSPEC_OK;
  });
}

polyspec_code polyspec_policy_next(polyspec_policy* policy, const polyspec_round_report* report,
                                   int64_t* windows, int32_t num_windows) {
  return guarded(__func__, [&, function = __func__]() -> polyspec_code {
    require(policy, "the policy is NULL");
    require(windows, "windows is NULL");
    if (num_windows != policy->chooser->levels() - 1) {
      throw std::invalid_argument("num_windows is not the number of levels less one");
    }
    const polyspec_code code = check_size(function, report, {});
    if (code != POLYSPEC_OK) return code;
    if (report->num_steps < 0 || report->num_tokens < 0) {
      throw std::invalid_argument("num_steps and num_tokens must be >= 0");
    }
    if (report->num_steps > 0) require(report->steps, "steps is NULL");
    if (report->num_tokens > 0) require(report->tokens, "tokens is NULL");
    policy->steps.clear();
    for (int64_t i = 0; i < report->num_steps; ++i) {
      const polyspec_step_report& step = report->steps[i];
      policy->steps.push_back({step.level, step.tokens, step.accepted, step.width, step.batch,
                               step.seconds, step.repeated != 0});
    }
    const polyspec::RoundReport read{report->request,   report->begins != 0, policy->steps.data(),
                                     report->num_steps, report->tokens,      report->num_tokens};
    policy->chooser->next(read, windows);
    return POLYSPEC_OK;
  });
}
