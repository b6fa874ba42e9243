/* The C interface of a scheduler with a tail, compiled as C99: the codes of wrong arguments, rounds
 * with a tail, and a caller without the field in its step. Ends with status 0, or 1 after the first
 * failed check. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"
#include "support/c_check.h"

static const int64_t kWindows[2] = {4, 2};

static void test_arguments(void) {
  polyspec_scheduler* s = NULL;
  CHECK(polyspec_scheduler_create(kWindows, 1, &s) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_set_tail(s, 1) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "polyspec_scheduler_set_tail: a tail needs three levels") !=
        NULL);
  CHECK(polyspec_scheduler_set_tail(s, 0) == POLYSPEC_OK);
  polyspec_scheduler_destroy(s);
  CHECK(polyspec_scheduler_create(kWindows, 2, &s) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_tail(s) == 0);
  CHECK(polyspec_scheduler_set_tail(s, -3) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(strstr(polyspec_last_error(), "tail must be >= 0, got -3") != NULL);
  CHECK(polyspec_scheduler_tail(s) == 0);
  CHECK(polyspec_scheduler_set_tail(s, 7) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_tail(s) == 7);
  CHECK(polyspec_scheduler_set_tail(NULL, 1) == POLYSPEC_INVALID_ARGUMENT);
  CHECK(polyspec_scheduler_tail(NULL) == -1);
  polyspec_scheduler_destroy(s);
}

static void expect(const polyspec_scheduler* s, int32_t kind, int32_t level, int64_t count,
                   int64_t of_tail) {
  polyspec_step step = polyspec_step_default();
  CHECK(polyspec_scheduler_next(s, &step) == POLYSPEC_OK);
  CHECK(step.struct_size == sizeof step);
  CHECK(step.kind == kind && step.level == level && step.count == count);
  CHECK(step.of_tail == of_tail);
}

static void test_rounds(void) {
  polyspec_scheduler* s = NULL;
  CHECK(polyspec_scheduler_create(kWindows, 2, &s) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_set_tail(s, 1) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_start(s, 1000) == POLYSPEC_OK);
  for (int round = 0; round < 2; ++round) {
    for (int block = 0; block < 2; ++block) {
      expect(s, POLYSPEC_STEP_DRAFT, 3, 2, 0);
      CHECK(polyspec_scheduler_report(s, 3, 2, 0) == POLYSPEC_OK);
      expect(s, POLYSPEC_STEP_VERIFY, 2, 2, 0);
      CHECK(polyspec_scheduler_report(s, 2, 3 - block, 0) == POLYSPEC_OK);
    }
    expect(s, POLYSPEC_STEP_DRAFT, 3, 1, 1);
    CHECK(polyspec_scheduler_report(s, 3, 2, 0) == POLYSPEC_WRONG_STATE);
    CHECK(polyspec_scheduler_report(s, 3, 1, 0) == POLYSPEC_OK);
    CHECK(polyspec_scheduler_pending(s, 1) == 6 && polyspec_scheduler_pending(s, 2) == 0);
    expect(s, POLYSPEC_STEP_VERIFY, 1, 6, 1);
    CHECK(polyspec_scheduler_report(s, 1, 7, 0) == POLYSPEC_OK);
  }
  CHECK(polyspec_scheduler_committed(s) == 14);
  polyspec_scheduler_destroy(s);
}

static void test_a_step_without_the_field(void) {
  const size_t size = POLYSPEC_STEP_WITHOUT_TAIL_SIZE;
  polyspec_scheduler* s = NULL;
  polyspec_step step;
  CHECK(polyspec_scheduler_create(kWindows, 2, &s) == POLYSPEC_OK);
  CHECK(polyspec_scheduler_start(s, 1000) == POLYSPEC_OK);
  memset(&step, 0x5a, sizeof step);
  step.struct_size = size;
  CHECK(polyspec_scheduler_next(s, &step) == POLYSPEC_OK);
  CHECK(step.struct_size == size);
  CHECK(step.kind == POLYSPEC_STEP_DRAFT && step.level == 3 && step.count == 2);
  CHECK(step.of_tail == INT64_C(0x5a5a5a5a5a5a5a5a)); /* no byte after the caller's struct */
  step.struct_size = size - 8;
  CHECK(polyspec_scheduler_next(s, &step) == POLYSPEC_BAD_STRUCT_SIZE);
  polyspec_scheduler_destroy(s);
}

int main(void) {
  test_arguments();
  test_rounds();
  test_a_step_without_the_field();
  printf("c_api_tail_test: all passed\n");
  return 0;
}
