/* The state rows of a batch through the C interface: one round of a chain of two levels. */
#include "support/c_check.h"

enum { LEVELS = 2, STEPS = 4, CAPACITY = 12, WIDTH = 5 };

int main(void) {
  int64_t state[200], due[2], input_ids[WIDTH], verified[2], plan[POLYSPEC_PLAN_ROWS], appended[2],
      kept[LEVELS];
  int64_t accepted[1] = {2};
  const int64_t drafted[2] = {4, 5}, emitted[3] = {4, 5, 6}, eos[1] = {6};
  int32_t status[2] = {0, 0};
  polyspec_round round = polyspec_round_default();
  round.levels = LEVELS;
  round.steps = STEPS;
  round.capacity = CAPACITY;
  round.batch = 1;
  CHECK(polyspec_round_words(&round) == polyspec_round_text_at(&round) + CAPACITY);
  CHECK(polyspec_round_words(&round) <= 200);
  memset(state, 0, sizeof state);
  int64_t* const target = state + polyspec_round_level_at(1);
  int64_t* const drafter = state + polyspec_round_level_at(2);
  int64_t* const log = state + polyspec_round_level_at(LEVELS + 1);
  int64_t* const text = state + polyspec_round_text_at(&round);
  state[POLYSPEC_ROUND_TOTAL] = 3;
  state[POLYSPEC_ROUND_ROOM] = 6;
  target[POLYSPEC_ROUND_WINDOW] = 2;
  text[0] = 7;
  text[1] = 8;
  text[2] = 9;

  polyspec_schedule_due_params d = polyspec_schedule_due_params_default();
  d.in = &round;
  d.due = due;
  CHECK_REFUSED("polyspec_schedule_due: state: expected a pointer, given null",
                polyspec_schedule_due(&d, NULL));
  round.state = state;
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_due(&d, NULL));
  CHECK(due[0] == 2 && due[1] == 2);

  polyspec_schedule_next_params n = polyspec_schedule_next_params_default();
  n.in = &round;
  n.level = 3;
  n.width = WIDTH;
  n.input_ids = input_ids;
  n.plan = plan;
  CHECK_REFUSED("level: expected [1, levels], given 3", polyspec_schedule_next(&n, NULL));
  n.level = 2;
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_next(&n, NULL));
  CHECK(plan[POLYSPEC_PLAN_PART] == 1 && plan[POLYSPEC_PLAN_COUNTS] == 3);
  CHECK(plan[POLYSPEC_PLAN_LENGTHS] == 2 && plan[POLYSPEC_PLAN_POSITIONS] == 3);
  CHECK(input_ids[0] == 7 && input_ids[2] == 9 && input_ids[3] == 0);

  polyspec_schedule_report_params r = polyspec_schedule_report_params_default();
  r.in = &round;
  r.level = 2;
  r.plan = plan;
  r.width = 2;
  r.tokens = drafted;
  r.status = status;
  r.appended = appended;
  r.kept = kept;
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_report(&r, NULL));
  CHECK(target[POLYSPEC_ROUND_PENDING] == 2 && appended[0] == 0 && appended[1] == 2);
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_due(&d, NULL));
  CHECK(due[0] == 1 && due[1] == 2);

  n.level = 1;
  n.most = 2;
  n.pending = verified;
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_next(&n, NULL));
  CHECK(verified[0] == 4 && verified[1] == 5);
  CHECK(plan[POLYSPEC_PLAN_COUNTS] == 5 && plan[POLYSPEC_PLAN_FIRST] == 2);
  CHECK(input_ids[3] == 4 && input_ids[4] == 5);
  r.level = 1;
  r.width = 3;
  r.tokens = emitted;
  CHECK_REFUSED("counts: expected a pointer, given null", polyspec_schedule_report(&r, NULL));
  r.counts = accepted;
  r.eos = eos;
  r.num_eos = 1;
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_report(&r, NULL));
  CHECK(state[POLYSPEC_ROUND_TOTAL] == 6 && text[5] == 6 && appended[1] == 0);
  CHECK(kept[0] == 5 && drafter[POLYSPEC_ROUND_ROUND] == 1);
  CHECK(log[POLYSPEC_ROUND_STEP_WORDS + POLYSPEC_ROUND_ACCEPTED] == 2);
  CHECK(log[POLYSPEC_ROUND_STEP_WORDS + POLYSPEC_ROUND_ENDED] == 1);
  CHECK_CODE(POLYSPEC_OK, polyspec_schedule_due(&d, NULL));
  CHECK(due[0] == 0); /* the text has ended */

  round.levels = 1;
  CHECK_REFUSED("levels: expected [2, 2^16), given 1", polyspec_schedule_due(&d, NULL));
  round.levels = 2;
  round.struct_size = 3;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_schedule_due(&d, NULL));
  return 0;
}
