/* The C interface of the window policies, compiled as C99. Ends with status 0, or 1 after the first
 * failed check. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"
#include "support/c_check.h"

static const int64_t kWindows[1] = {4};

static polyspec_policy_options options(int32_t kind) {
  polyspec_policy_options out = polyspec_policy_options_default();
  out.kind = kind;
  out.num_windows = 1;
  out.windows = kWindows;
  return out;
}

static void test_arguments(void) {
  polyspec_policy* policy = (polyspec_policy*)(void*)&kWindows;
  polyspec_policy_options given = options(POLYSPEC_POLICY_FSM);
  CHECK(polyspec_policy_create(&given, NULL) == POLYSPEC_INVALID_ARGUMENT);
  given.history = 0;
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(policy == NULL);
  CHECK(strstr(polyspec_last_error(), "polyspec_policy_create: history: expected >= 1") != NULL);
  given = options(77);
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "kind") != NULL);
  given = options(POLYSPEC_POLICY_FSM);
  given.windows = NULL;
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_INVALID_ARGUMENT);
  given = options(POLYSPEC_POLICY_FSM);
  given.struct_size = 3;
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_BAD_STRUCT_SIZE);
  polyspec_policy_destroy(NULL);
}

static void test_rounds(void) {
  const int64_t prompt[3] = {1, 2, 3};
  int64_t windows[1] = {-1};
  polyspec_policy* policy = NULL;
  const polyspec_policy_options given = options(POLYSPEC_POLICY_FSM);
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_OK);
  polyspec_round_report report = polyspec_round_report_default();
  report.begins = 1;
  report.tokens = prompt;
  report.num_tokens = 3;
  CHECK(polyspec_policy_next(policy, &report, windows, 2) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
  CHECK(windows[0] == 4);
  polyspec_step_report step = {1, 0, 4, 4, 4, 1, 0.0};
  report.begins = 0;
  report.steps = &step;
  report.num_steps = 1;
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
  CHECK(windows[0] == 5);
  step.accepted = 5; /* more than were verified */
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
  step.accepted = 0;
  step.level = 3;
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_policy_reset(policy) == POLYSPEC_OK);
  report.begins = 1;
  report.num_steps = 0;
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
  CHECK(windows[0] == 4);
  polyspec_policy_destroy(policy);
}

int main(void) {
  test_arguments();
  test_rounds();
  printf("c_api_policy_test: all passed\n");
  return 0;
}
