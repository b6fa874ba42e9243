// The schedule through both of its entry points, Scheduler and the operators over a state row:
// scripted rounds, misuse, and a random property test against the contract in scheduler.hpp. Bounds
// on the blocks of a level have separate scripts (scheduler_rounds_test.cpp) and are among the
// random requests.
#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include "support/scheduler_steps.hpp"

namespace {

using namespace scheduler_steps;

void test_three_levels() {
  Scheduler s({6, 4});
  expect_done(s);  // nothing was started
  s.start(100);
  CHECK_EQ(3, s.levels());
  expect_draft(s, 3, 4);
  s.report(3, 4);
  expect_verify(s, 2, 4);
  s.report(2, 3);  // two accepted and a correction
  CHECK_EQ(3, s.pending(1));
  CHECK_EQ(0, s.pending(2));
  expect_draft(s, 3, 4);  // level 1 waits for 6
  s.report(3, 4);
  s.report(2, 5);  // all and the bonus: the block overshoots its window
  expect_verify(s, 1, 8);
  s.report(1, 9);
  CHECK_EQ(9, s.committed());
  CHECK_EQ(0, s.pending(1));
  expect_draft(s, 3, 4);
}

void test_room() {
  Scheduler s({8, 4});
  s.start(4);
  expect_draft(s, 3,
               2);  // level 1 verifies at most 3 tokens, so level 2 emits at most 3 and verifies 2
  s.report(3, 2);
  expect_verify(s, 2, 2);
  s.report(2, 1);
  expect_draft(s, 3, 1);  // level 2 may emit two more
  s.report(3, 1);
  s.report(2, 1);
  expect_verify(s, 2, 0);  // one more: level 2 decodes
  s.report(2, 1);
  expect_verify(s, 1, 3);
  s.report(1, 3);
  expect_verify(s, 1, 0);  // one token is missing
  s.report(1, 1);
  CHECK_EQ(4, s.committed());
  expect_done(s);
}

void test_zero_windows() {
  Scheduler plain({0, 4});
  plain.start(3);
  for (int i = 0; i < 3; ++i) {
    expect_verify(plain, 1, 0);
    plain.report(1, 1);
  }
  expect_done(plain);

  Scheduler middle({2, 0});  // the middle level decodes alone, the drafter rests
  middle.start(10);
  expect_verify(middle, 2, 0);
  middle.report(2, 1);
  expect_verify(middle, 2, 0);
  middle.report(2, 1);
  expect_verify(middle, 1, 2);

  Scheduler none({4});
  none.start(0);
  expect_done(none);
}

void test_eos() {
  Scheduler s({6, 4});
  s.start(100);
  s.report(3, 2, true);                            // the drafter stops at its EOS
  expect_verify(s, 2, 2);                          // no further draft is asked for
  CHECK_THROWS(std::logic_error, s.report(2, 3));  // nothing follows an accepted EOS
  s.report(2, 2, true);
  expect_verify(s, 1, 2);
  s.report(1, 1);  // the target disagrees: the text goes on
  expect_draft(s, 3, 4);
  s.report(3, 4);
  s.report(2, 2, true);  // EOS as the correction
  expect_verify(s, 1, 2);
  s.report(1, 2, true);
  CHECK_EQ(3, s.committed());
  expect_done(s);
  s.start(5);  // the object serves the next request
  expect_draft(s, 3, 3);
}

void test_exhausted_drafter() {
  Scheduler s({5, 4});
  s.start(100);
  s.report(3, 1);
  expect_verify(s, 2, 1);
  s.report(2, 2);
  s.report(3, 0);  // nothing to propose: level 2 decodes
  expect_verify(s, 2, 0);
  s.report(2, 1);
  CHECK_EQ(3, s.pending(1));
  expect_draft(s, 3, 4);  // a new round asks again
}

void test_set_windows() {
  Scheduler s({4, 3});
  s.start(100);
  s.report(3, 3);
  s.set_windows({4, 5});  // a larger window asks for the difference
  expect_draft(s, 3, 2);
  s.report(3, 2);
  expect_verify(s, 2, 5);
  s.report(2, 2);
  expect_draft(s, 3, 5);
  s.report(3, 5);
  s.set_windows({2, 5});  // level 1 would be ready, but the five drafts are verified first
  expect_verify(s, 2, 5);
  s.report(2, 1);
  expect_verify(s, 1, 3);
  s.report(1, 4);
  expect_draft(s, 3, 5);
  s.report(3, 5);
  s.set_windows({2, 9});
  s.report(3, 2);  // short: the round is closed with 7 tokens
  s.set_windows({0, 9});
  expect_verify(s, 2, 7);
  s.report(2, 1);
  expect_verify(s, 1, 1);
  s.report(1, 1);
  expect_verify(s, 1, 0);
  s.set_windows({2, 9});
  s.report(3, 0);
  s.set_windows({0, 9});
  expect_verify(s, 2, 0);  // an empty proposal is an outcome too: it is not undone
  CHECK_EQ(9, s.windows()[1]);
}

void test_misuse() {
  CHECK_THROWS(std::invalid_argument, Scheduler({}));
  CHECK_THROWS(std::invalid_argument, Scheduler({3, -1}));
  CHECK_THROWS(std::invalid_argument, Scheduler(std::vector<int64_t>(1 << 16, 1)));
  Scheduler s({4, 3});
  CHECK_THROWS(std::logic_error, s.report(1, 1));  // no request
  CHECK_THROWS(std::invalid_argument, s.start(-1));
  s.start(20);
  CHECK_THROWS(std::logic_error, s.report(2, 1));  // next() names level 3
  CHECK_THROWS(std::logic_error, s.report(3, 4));
  CHECK_THROWS(std::logic_error, s.report(3, -1));
  CHECK_THROWS(std::logic_error, s.report(3, 0, true));
  s.report(3, 3);
  CHECK_THROWS(std::logic_error, s.report(2, 0));
  CHECK_THROWS(std::logic_error, s.report(2, 5));
  CHECK_THROWS(std::invalid_argument, s.set_windows({4}));
  CHECK_THROWS(std::invalid_argument, s.set_windows({4, -3}));
  CHECK_EQ(3, s.windows()[1]);
  CHECK_THROWS(std::out_of_range, s.pending(0));
  CHECK_THROWS(std::out_of_range, s.pending(3));
  expect_verify(s, 2, 3);  // no failed call changed anything
}

// Plays random requests and keeps separate counts. Every step must fit them, and the request must
// end.
void test_random_requests() {
  std::mt19937_64 random(20240607);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t steps = 0, full = 0, bounded = 0;
  for (int request = 0; request < 20000; ++request) {
    const int32_t n = 2 + static_cast<int32_t>(below(4));
    const bool moving = below(3) == 0;
    const bool stingy = below(3) == 0;  // a drafter that proposes fewer than asked
    const int64_t eos_one_in = below(2) == 0 ? 0 : 1 + below(30);
    const auto draw_windows = [&] {
      std::vector<int64_t> windows(n - 1);
      for (auto& w : windows) w = below(8) == 0 ? INT64_MAX : below(7);
      return windows;
    };
    std::vector<int64_t> windows = draw_windows(), rounds(n - 1, 0);
    if (below(3) != 0) {
      for (auto& r : rounds) r = below(4);
    }
    const int64_t limit = below(24);
    Scheduler s(windows, rounds);
    s.start(limit);
    std::vector<int64_t> pending(n, 0);  // pending[i]: of level i; [0] are the committed tokens
    std::vector<int64_t> blocks(n, 0);
    std::vector<bool> ends(n, false);
    int64_t budget = (limit + 1) << n;  // far above the worst case of one token per step and level
    bool short_draft = false;
    const auto room_of = [&](int32_t level) {
      int64_t room = limit - pending[0];
      for (int32_t j = 1; j < level; ++j) room -= 1 + pending[j];
      return room;
    };
    const auto wanted_by = [&](int32_t level) {
      return std::min(windows[level - 1], room_of(level) - 1);
    };
    const auto got_rounds = [&](int32_t level) {
      return rounds[level - 1] > 0 && blocks[level] >= rounds[level - 1];
    };
    while (!s.done()) {
      CHECK(budget-- > 0);
      ++steps;
      if (moving && below(4) == 0) s.set_windows(windows = draw_windows());
      const Step step = s.next();
      const Step again = s.next();
      CHECK(step.kind == again.kind && step.level == again.level && step.count == again.count);
      CHECK(step.kind != Step::Kind::kDone);
      int64_t waiting = 0;
      for (int32_t i = 1; i < n; ++i) {
        CHECK_EQ(pending[i], s.pending(i));
        waiting += pending[i];
        CHECK(rounds[i - 1] == 0 || blocks[i] <= rounds[i - 1]);
      }
      // No level above waits longer than it must.
      for (int32_t i = 1; i < step.level; ++i) CHECK(!got_rounds(i));
      for (int32_t i = 1; i < step.level && !moving; ++i) {
        CHECK(!(pending[i] >= wanted_by(i) || ends[i] || (i == n - 1 && short_draft)));
      }
      if (step.kind == Step::Kind::kDraft) {
        CHECK_EQ(n, step.level);
        CHECK(step.count >= 1);
        CHECK(step.count + pending[n - 1] <= windows[n - 2]);
        // Were all accepted everywhere, every level would add its bonus: still within the limit.
        CHECK(s.committed() + waiting + step.count + n - 1 <= limit);
        const bool eos = eos_one_in > 0 && below(eos_one_in) == 0;
        const int64_t e = eos || stingy ? below(step.count + 1) : step.count;
        short_draft = e < step.count;
        ends[n - 1] = eos && e > 0;
        pending[n - 1] += e;
        ++blocks[n - 1];
        s.report(n, e, eos && e > 0);
        continue;
      }
      const int32_t i = step.level;
      CHECK(i >= 1 && i < n);
      CHECK_EQ(pending[i], step.count);
      for (int32_t j = i + 1; j < n; ++j)
        CHECK_EQ(int64_t{0}, pending[j]);  // nothing is thrown away unverified
      if (!moving) {  // it runs because it is full, for lack of room, with all its blocks, at an
                      // EOS, or the drafter gave up
        const bool fits = step.count >= wanted_by(i);
        CHECK(fits || got_rounds(i) || ends[i] || (i == n - 1 && short_draft));
        full += fits;
        bounded += !fits && got_rounds(i);
        CHECK(step.count <= room_of(i) - 1);
      }
      int64_t most = step.count + (ends[i] ? 0 : 1);
      CHECK_THROWS(std::logic_error, s.report(i, most + 1));
      int64_t e = below(3) == 0 ? 1 : 1 + below(most);
      if (below(3) == 0) e = most;
      const bool eos = (ends[i] && e == most) || (eos_one_in > 0 && below(eos_one_in) == 0);
      ends[i] = false;
      if (i == n - 1) short_draft = false;
      pending[i] = blocks[i] = 0;
      pending[i - 1] += e;
      ++blocks[i - 1];
      ends[i - 1] = eos;
      s.report(i, e, eos);
      CHECK_EQ(pending[0], s.committed());
      CHECK(s.committed() <= limit);
      CHECK_EQ((i == 1 && eos) || s.committed() == limit, s.done());
    }
    expect_done(s);
    CHECK_THROWS(std::logic_error, s.report(1, 1));
    CHECK(ends[0] || s.committed() == limit);
  }
  CHECK(full > steps / 20);
  CHECK(bounded > steps / 50);
  std::printf("scheduler: 20000 random requests, %lld steps\n", static_cast<long long>(steps));
}

}  // namespace

int main() {
  test_three_levels();
  test_room();
  test_zero_windows();
  test_eos();
  test_exhausted_drafter();
  test_set_windows();
  test_misuse();
  test_random_requests();
  return 0;
}
