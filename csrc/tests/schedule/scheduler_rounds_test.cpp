// The schedule with bounded rounds, through both of its entry points: a level verifies once so many
// blocks have come from below, though its window is not full.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/scheduler_steps.hpp"

namespace {

using namespace scheduler_steps;

void test_bounded_level() {
  Scheduler s({100, 4}, {2, 0});
  CHECK(s.rounds() == (std::vector<int64_t>{2, 0}));
  CHECK(Scheduler({100, 4}).rounds() == (std::vector<int64_t>{0, 0}));
  s.start(1000);
  for (int round = 0; round < 3; ++round) {  // the count of blocks starts anew
    for (const int64_t block : {5, 1}) {
      expect_draft(s, 3, 4);
      s.report(3, 4);
      expect_verify(s, 2, 4);
      s.report(2, block);
    }
    expect_verify(s, 1, 6);
    s.report(1, 1);
  }
  s.report(3, 4);
  s.report(2, 1);
  s.start(1000);  // a new request has no blocks either
  for (int block = 0; block < 2; ++block) {
    expect_draft(s, 3, 4);
    s.report(3, 4);
    s.report(2, 2);
  }
  expect_verify(s, 1, 4);

  Scheduler full({3, 4}, {3, 0});  // a full window does not wait for the bound
  full.start(100);
  full.report(3, 4);
  full.report(2, 5);
  expect_verify(full, 1, 5);

  Scheduler free({1000, 1}, {0, 0});  // 0 is no bound
  free.start(2000);
  for (int block = 0; block < 500; ++block) {
    expect_draft(free, 3, 1);
    free.report(3, 1);
    free.report(2, 1);
  }
  expect_draft(free, 3, 1);

  // The drafter's block counts too, and a larger window does not undo it.
  Scheduler grown({4}, {1});
  grown.start(100);
  grown.report(2, 4);
  grown.set_windows({9});
  CHECK(grown.rounds() == (std::vector<int64_t>{1}));
  expect_verify(grown, 1, 4);
}

void test_two_bounded_levels() {
  Scheduler s({100, 100, 2}, {2, 3, 0});
  s.start(1000);
  for (int round = 0; round < 2; ++round) {
    for (int outer = 0; outer < 2; ++outer) {
      for (int inner = 0; inner < 3; ++inner) {
        expect_draft(s, 4, 2);
        s.report(4, 2);
        expect_verify(s, 3, 2);
        s.report(3, 1 + inner);
      }
      expect_verify(s, 2, 6);
      s.report(2, 1 + outer);
    }
    expect_verify(s, 1, 3);
    s.report(1, 4);
  }
}

void test_eos() {
  Scheduler s({100, 4}, {3, 0});
  s.start(1000);
  s.report(3, 2, true);
  expect_verify(s, 2, 2);
  s.report(2, 2, true);
  expect_verify(s, 1, 2);  // nothing can follow: the bound is not waited for
  s.report(1, 1);          // the target disagrees, and three blocks make a round again
  for (int block = 0; block < 3; ++block) {
    expect_draft(s, 3, 4);
    s.report(3, block == 1 ? 0 : 4);  // a short draft is a block as well
    s.report(2, 1);
  }
  expect_verify(s, 1, 3);
  s.report(1, 4, true);
  expect_done(s);
}

void test_little_room() {
  Scheduler s({8, 4}, {2, 0});
  s.start(4);
  expect_draft(s, 3, 2);
  s.report(3, 2);
  s.report(2, 1);
  expect_draft(s, 3, 1);
  s.report(3, 1);
  s.report(2, 1);
  expect_verify(s, 1, 2);  // without a bound, level 2 would decode a third token
  s.report(1, 2);
  expect_verify(s, 2, 0);  // two are missing: level 1 wants one, and level 2 decodes it
  s.report(2, 1);
  expect_verify(s, 1, 1);  // no room for a second block
  s.report(1, 1);
  expect_verify(s, 1, 0);
  s.report(1, 1);
  expect_done(s);
}

// The message of std::invalid_argument from creating a scheduler.
std::string refusal(std::vector<int64_t> windows, std::vector<int64_t> rounds) {
  try {
    Scheduler(std::move(windows), std::move(rounds));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

void test_bad_rounds() {
  CHECK_EQ(std::string("expected 2 rounds, one for each window, got 1"), refusal({4, 3}, {1}));
  CHECK_EQ(std::string("expected 2 rounds, one for each window, got 3"),
           refusal({4, 3}, {1, 0, 0}));
  CHECK_EQ(std::string("rounds of level 2 must be >= 0, got -5"), refusal({4, 3}, {1, -5}));
  CHECK_EQ(std::string("accepted"), refusal({4, 3}, {}));
}

}  // namespace

int main() {
  test_bounded_level();
  test_two_bounded_levels();
  test_eos();
  test_little_room();
  test_bad_rounds();
  return 0;
}
