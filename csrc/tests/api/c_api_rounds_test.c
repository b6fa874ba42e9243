/* The C interface of a scheduler with bounded rounds, compiled as C99: the codes of wrong
 * arguments, and one round that a bound ends. Ends with status 0, or 1 after the first failed
 * check. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"
#include "support/c_check.h"

static const int64_t kWindows[2] = {100, 2};
static const int64_t kRounds[2] = {2, 0};

static void test_arguments(void) {
  const int64_t negative[2] = {1, -7};
  polyspec_scheduler* const untouched = (polyspec_scheduler*)(void*)&kWindows;
  polyspec_scheduler* s = untouched;
  CHECK(polyspec_scheduler_create_bounded(kWindows, kRounds, 2, NULL) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_scheduler_create_bounded(NULL, kRounds, 2, &s) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(s == NULL); /* a failed call writes no address */
  CHECK(polyspec_scheduler_create_bounded(kWindows, NULL, 2, &s) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "polyspec_scheduler_create_bounded: rounds") != NULL);
  CHECK(polyspec_scheduler_create_bounded(kWindows, kRounds, 0, &s) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_scheduler_create_bounded(negative, kRounds, 2, &s) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "window of level 2") != NULL);
  CHECK(polyspec_scheduler_create_bounded(kWindows, negative, 2, &s) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "rounds of level 2 must be >= 0, got -7") != NULL);
  CHECK(s == NULL);
}

static void expect(const polyspec_scheduler* s, int32_t kind, int32_t level, int64_t count) {
  polyspec_step step = polyspec_step_default();
  CHECK(polyspec_scheduler_next(s, &step) == POLYSPEC_OK);
  CHECK(step.kind == kind && step.level == level && step.count == count);
}

static void test_round(void) {
  polyspec_scheduler* s = NULL;
  CHECK(polyspec_scheduler_create_bounded(kWindows, kRounds, 2, &s) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_levels(s) == 3);
  CHECK(polyspec_scheduler_start(s, 1000) == POLYSPEC_OK);
  for (int round = 0; round < 2; ++round) {
    for (int block = 0; block < 2; ++block) {
      expect(s, POLYSPEC_STEP_DRAFT, 3, 2);
      CHECK(polyspec_scheduler_report(s, 3, 2, 0) == POLYSPEC_OK);
      expect(s, POLYSPEC_STEP_VERIFY, 2, 2);
      CHECK(polyspec_scheduler_report(s, 2, 1 + block, 0) == POLYSPEC_OK);
    }
    expect(s, POLYSPEC_STEP_VERIFY, 1, 3);
    CHECK(polyspec_scheduler_report(s, 1, 4, 0) == POLYSPEC_OK);
  }
  CHECK(polyspec_scheduler_committed(s) == 8);
  polyspec_scheduler_destroy(s);
}

int main(void) {
  test_arguments();
  test_round();
  printf("c_api_rounds_test: all passed\n");
  return 0;
}
