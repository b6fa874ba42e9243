// The schedule with a tail, through both of its entry points: before the target verifies the tokens
// of level 2, level n drafts more after them.
#include <stdexcept>

#include "support/scheduler_steps.hpp"

namespace {

using namespace scheduler_steps;

// Blocks of so many tokens from level 2 of three, each after a draft where there is room for one.
void hand_up(Scheduler& s, std::initializer_list<int64_t> blocks) {
  for (const int64_t block : blocks) {
    if (s.next().level == 3) s.report(3, s.next().count);
    s.report(2, block);
  }
}

void expect_tail(const Scheduler& s, int64_t count) {
  expect_draft(s, s.levels(), count);
  CHECK_EQ(count, s.next().of_tail);
}

void test_round() {
  Scheduler s({4, 2});
  s.set_tail(1);
  s.start(1000);
  for (int round = 0; round < 2; ++round) {
    expect_draft(s, 3, 2);
    CHECK_EQ(int64_t{0}, s.next().of_tail);
    hand_up(s, {3, 1});
    expect_tail(s, 1);
    s.report(3, 1);
    CHECK_EQ(int64_t{5}, s.pending(1));
    CHECK_EQ(int64_t{0}, s.pending(2));
    expect_verify(s, 1, 5);
    CHECK_EQ(int64_t{1}, s.next().of_tail);
    s.report(1, round == 0 ? 6 : 2);
  }
}

void test_length() {
  Scheduler s({4, 2});
  s.set_tail(100);
  s.start(1000);
  hand_up(s, {3, 3});
  expect_tail(s, 2);  // no more than a draft has
  s.report(3, 1);     // and fewer, where the drafter has no more
  expect_verify(s, 1, 7);
  CHECK_EQ(int64_t{1}, s.next().of_tail);
  s.report(1, 1);
  hand_up(s, {3, 3});
  s.report(3, 0);
  expect_verify(s, 1, 6);
  CHECK_EQ(int64_t{0}, s.next().of_tail);
  s.report(1, 1);
  s.set_tail(0);
  hand_up(s, {3, 3});
  expect_verify(s, 1, 6);

  Scheduler bounded({100, 2}, {1, 0});  // a window that is not full has one as well
  bounded.set_tail(2);
  bounded.start(1000);
  hand_up(bounded, {2});
  expect_tail(bounded, 2);
  bounded.report(3, 2);
  bounded.start(1000);  // nothing of it is left for the next request
  hand_up(bounded, {2});
  expect_tail(bounded, 2);
}

void test_room() {
  for (const int64_t room : {5, 6, 7, 8}) {
    Scheduler s({4, 2});
    s.set_tail(2);
    s.start(room);
    hand_up(s, {3, 1});
    const int64_t left = room - 5 < 2 ? room - 5 : 2;
    if (left > 0) {
      expect_tail(s, left);
      s.report(3, left);
    }
    expect_verify(s, 1, 4 + left);
    s.report(1, 5 + left);
    CHECK_EQ(5 + left, s.committed());
  }
}

void test_eos() {
  Scheduler s({4, 2});
  s.set_tail(2);
  s.start(1000);
  s.report(3, 2);
  s.report(2, 2, true);
  expect_verify(s, 1, 2);  // nothing follows an EOS
  s.report(1, 1);
  hand_up(s, {3, 3});
  s.report(3, 1, true);
  expect_verify(s, 1, 7);
  CHECK_THROWS(std::logic_error, s.report(1, 8));
  s.report(1, 7, true);
  expect_done(s);
}

void test_windows() {
  Scheduler s({0, 2});
  s.set_tail(2);
  s.start(1000);
  expect_verify(s, 1, 0);  // a target that decodes alone
  s.set_windows({2, 0});
  expect_verify(s, 2, 0);
  s.report(2, 1);
  s.report(2, 1);
  expect_verify(s, 1, 2);  // no draft, and so no tail
  s.report(1, 3);
  s.set_windows({4, 2});
  hand_up(s, {3, 3});
  s.report(3, 2);
  s.set_windows({9, 2});  // larger from the next round on: after a tail comes its verification
  expect_verify(s, 1, 8);
  s.set_windows({4, 2});
  s.report(1, 9);
  s.report(3, 2);
  s.set_windows({0, 2});  // drafted tokens are verified first
  expect_verify(s, 2, 2);
  s.report(2, 3);
  expect_tail(s, 2);
}

void test_four_levels() {
  Scheduler s({4, 3, 2});
  s.set_tail(2);
  s.start(1000);
  for (const int64_t block : {3, 1}) {
    s.report(4, 2);
    s.report(3, 3);
    s.report(2, block);  // no tail for level 2
  }
  expect_tail(s, 2);
  s.report(4, 2);
  expect_verify(s, 1, 6);
}

// Level 2 decodes alone, and all drafts are tails.
void test_a_level_that_decodes_alone() {
  Scheduler s({5, 0, 3});
  s.set_tail(2);
  s.start(1000);
  for (int round = 0; round < 2; ++round) {
    for (int block = 0; block < 5; ++block) {
      expect_verify(s, 2, 0);
      s.report(2, 1);
    }
    expect_tail(s, 2);
    s.report(4, 2);
    expect_verify(s, 1, 7);
    s.report(1, round == 0 ? 8 : 3);
  }
}

void test_misuse() {
  Scheduler s({4, 2});
  CHECK_THROWS(std::invalid_argument, s.set_tail(-1));
  Scheduler two({4});
  CHECK_THROWS(std::invalid_argument, two.set_tail(1));
  two.set_tail(0);
}

}  // namespace

int main() {
  test_round();
  test_length();
  test_room();
  test_eos();
  test_windows();
  test_four_levels();
  test_a_level_that_decodes_alone();
  test_misuse();
  return 0;
}
