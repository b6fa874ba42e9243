/* The C interface of the window policies, compiled as C99. Ends with status 0, or 1 after the first
 * failed check. */
#include <stddef.h>
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

/* A row is an index in a batch, not the number of a request: memory is kept up to the largest. */
static void test_rows(void) {
  int64_t windows[1] = {-1};
  polyspec_policy* policy = NULL;
  polyspec_policy_options given = options(POLYSPEC_POLICY_FSM);
  polyspec_round_report report = polyspec_round_report_default();
  CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_OK);
  report.begins = 1;
  report.row = (int64_t)1 << 32;
  CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "row: expected 0 to 65535, given 4294967296") != NULL);
  CHECK(polyspec_policy_forget_row(policy, report.row) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_policy_forget_row(policy, -1) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_policy_forget_row(NULL, 0) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_policy_forget_row(policy, 65535) == POLYSPEC_OK); /* never reported */
  polyspec_policy_destroy(policy);

  /* The windows of other rows stay; the report of the row is not used. */
  const polyspec_step_report whole = {1, 0, 4, 4, 4, 1, 0.0};
  const int64_t expected[2][2] = {{5, 6}, {5, 5}};
  for (int forgets = 0; forgets < 2; ++forgets) {
    CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_OK);
    report = polyspec_round_report_default();
    report.row = 3;
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
    report.steps = &whole;
    report.num_steps = 1;
    for (int round = 0; round < 2; ++round) {
      if (round == 1 && forgets) CHECK(polyspec_policy_forget_row(policy, 3) == POLYSPEC_OK);
      CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
      CHECK(windows[0] == expected[forgets][round]);
    }
    polyspec_policy_destroy(policy);
  }
}

/* Counts that a sum could not hold. */
static void test_counts(void) {
  int64_t windows[1] = {-1};
  int32_t kind;
  for (kind = POLYSPEC_POLICY_FIXED; kind <= POLYSPEC_POLICY_JOINT; ++kind) {
    polyspec_policy* policy = NULL;
    polyspec_policy_options given = options(kind);
    polyspec_round_report report = polyspec_round_report_default();
    polyspec_step_report step = {1, 0, INT64_MAX, INT64_MAX, 4, 1, 0.0};
    CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_OK);
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
    report.steps = &step;
    report.num_steps = 1;
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
    CHECK(strstr(polyspec_last_error(), "accepted <= tokens") != NULL);
    step.tokens = step.accepted = 2147483647;
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
    report.num_tokens = INT64_MAX;
    report.tokens = kWindows;
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
    report.num_tokens = 0;
    report.batch = 65537;
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_INVALID_ARGUMENT);
    CHECK(strstr(polyspec_last_error(), "batch: expected 0 to 65536, given 65537") != NULL);
    report.struct_size = offsetof(polyspec_round_report, batch); /* before there was one */
    CHECK(polyspec_policy_next(policy, &report, windows, 1) == POLYSPEC_OK);
    polyspec_policy_destroy(policy);
    given.guard_hold = INT64_MAX;
    CHECK(polyspec_policy_create(&given, &policy) == POLYSPEC_INVALID_ARGUMENT);
    CHECK(strstr(polyspec_last_error(), "guard_hold: expected 1 to 2147483647") != NULL);
  }
}

int main(void) {
  test_arguments();
  test_rounds();
  test_rows();
  test_counts();
  printf("c_api_policy_test: all passed\n");
  return 0;
}
