// schedule_next and schedule_report where something is at its end: the text, the room, the
// capacity, the log, the width, or the caller's attention.
#include <algorithm>
#include <string>

#include "polyspec/status.hpp"
#include "support/random_schedule.hpp"
#include "support/state_rows.hpp"

namespace {

using polyspec::Result;
using polyspec::ScheduleDueParams;
using polyspec::ScheduleNextParams;
using polyspec::ScheduleReportParams;
using state_rows::Came;
using state_rows::Entry;
using state_rows::kIdle;
using state_rows::kPadding;
using state_rows::Planned;
using state_rows::Shape;
using state_rows::StateRows;

using Words = std::vector<int64_t>;

constexpr int64_t kEos = 9;
constexpr int32_t kTarget = 1, kMiddle = 2, kDrafter = 3;

// Three levels and one row: the prompt 5 6 7; no cache holds its last token.
struct Chain {
  explicit Chain(int64_t room = 100, int64_t capacity = 40, int64_t steps = 12)
      : rows(3, 1, capacity, steps) {
    rows.begin(0, room, {5, 6, 7}, {2, 2, 2}, {0, 0, 0});
    rows.set_windows(0, {100, 2}, {2, 0});
  }

  // One step with a known part; returns its `slots`.
  Words draft(const Words& tokens, std::vector<int32_t> status = {}, Words eos = {kEos, -1}) {
    CHECK_EQ(1, rows.next(kDrafter, 30)[0].part);
    status.resize(tokens.size(), 0);
    return rows.report(kDrafter, {static_cast<int64_t>(tokens.size()), tokens, {}, status, eos});
  }
  Words verify(int32_t level, int64_t accepted, const Words& tokens, int32_t status = 0) {
    CHECK_EQ(1, rows.next(level, 30)[0].part);
    return rows.report(
        level, {static_cast<int64_t>(tokens.size()), tokens, {accepted}, {status}, {kEos, -1}});
  }
  bool part(int32_t level, int64_t width = 30) { return rows.next(level, width)[0].part != 0; }
  int64_t total() { return rows.header(0, Shape::kTotal); }
  int64_t cached(int32_t level) { return rows.level(0, level, Shape::kCached); }
  bool stopped() { return rows.header(0, Shape::kStopped) != 0; }
  void expect_idle() {
    for (int32_t level = 1; level <= kDrafter; ++level) CHECK(!part(level));
  }
  void expect_text(const Words& tokens) {
    CHECK_EQ(static_cast<int64_t>(tokens.size()), total());
    for (size_t i = 0; i < tokens.size(); ++i)
      CHECK_EQ(tokens[i], rows.text(0, static_cast<int64_t>(i)));
  }

  StateRows rows;
};

// One round by hand, with every number of the plan.
void test_round() {
  Chain c;
  CHECK(c.rows.next(kDrafter, 2)[0] == (Planned{1, 1, 0, 2, 3, 0, {7, 0}}));
  CHECK(c.rows.next(kMiddle, 2)[0] == (Planned{0, 0, 0, 0, 3, 0, {0, 0}}));
  CHECK(c.draft({1, 2}) == (Words{0, 1}));
  CHECK_EQ(4, c.cached(kDrafter));  // of 5: no pass has read the last draw
  CHECK(c.rows.next(kMiddle, 4)[0] == (Planned{1, 3, 0, 2, 3, 0, {7, 1, 2, 0}}));
  CHECK(c.verify(kMiddle, 1, {1, 3, -1}) == (Words{0, 1, kPadding}));
  c.expect_text({5, 6, 7, 1, 3});
  CHECK_EQ(4, c.cached(kMiddle));
  CHECK_EQ(4, c.cached(kDrafter));
  c.draft({4, 4});
  CHECK(c.verify(kMiddle, 2, {4, 4, 8}) == (Words{2, 3, 4}));
  CHECK_EQ(2, c.cached(kTarget));
  CHECK(c.rows.next(kTarget, 6)[0] == (Planned{1, 6, 0, 5, 3, 0, {7, 1, 3, 4, 4, 8}}));
  CHECK(c.verify(kTarget, 2, {1, 3, 0, -1, -1, -1}) == Words(6, kPadding));
  c.expect_text({5, 6, 7, 1, 3, 0});
  for (int32_t level = 1; level <= kDrafter; ++level) CHECK_EQ(5, c.cached(level));
  CHECK_EQ(97, c.rows.header(0, Shape::kRoom));
  CHECK(c.rows.log(0, 1) == (Entry{2, 3, 1, 2, 0, 0}));
  CHECK(c.rows.log(0, 4) == (Entry{5, 3, 2, 3, 0, 0}));
  CHECK(c.part(kDrafter));
}

void test_eos() {
  Chain c;
  c.draft({kEos, 2});  // after its EOS a draft has nothing more
  c.expect_text({5, 6, 7, kEos});
  CHECK(c.rows.log(0, 0) == (Entry{2, 3, 0, 1, 1, 0}));
  CHECK(!c.part(kDrafter));
  CHECK(c.verify(kMiddle, 1, {kEos, 4, -1}) == (Words{0, kPadding, kPadding}));
  CHECK(c.rows.log(0, 1) == (Entry{1, 3, 1, 1, 1, 0}));
  CHECK(c.part(kTarget));  // its second block is not waited for
  c.verify(kTarget, 0, {3, -1});
  CHECK(c.part(kDrafter));  // the target disagreed: the text goes on
  c.draft({1, 2});
  c.verify(kMiddle, 1, {1, kEos, -1});
  c.verify(kTarget, 2, {1, kEos, 4});
  CHECK(c.rows.log(0, 5) == (Entry{2, 4, 2, 2, 1, 0}));
  CHECK_EQ(0, c.rows.header(0, Shape::kRoom));
  c.expect_text({5, 6, 7, 3, 1, kEos});
  c.expect_idle();
  CHECK(!c.stopped());

  Chain none;  // -1 is no id, and ids may be none at all
  none.draft({1, kEos}, {}, {});
  CHECK_EQ(0, none.rows.log(0, 0).ended);

  Chain late;  // an id that ends the text from now on: tokens accepted after it are cut as well
  late.draft({kEos, 2}, {}, {});
  late.verify(kMiddle, 2, {kEos, 2, 4});
  CHECK(late.rows.log(0, 1) == (Entry{2, 3, 1, 1, 1, 0}));
  late.expect_text({5, 6, 7, kEos});
  for (const int32_t level : {kMiddle, kDrafter}) CHECK_EQ(4, late.cached(level));
}

void test_done() {
  Chain c(0);
  c.expect_idle();
  CHECK(c.rows.report(kDrafter, {2, {1, 1}, {}, {0, 0}, {}}) == (Words{kPadding, kPadding}));
  CHECK(c.rows.log(0, 0) == kIdle);
  c.expect_text({5, 6, 7});

  Chain last(1);  // room for one token: the target decodes alone
  CHECK(last.rows.next(kTarget, 1)[0] == (Planned{1, 1, 0, 0, 3, 0, {7}}));
  last.verify(kTarget, 0, {4});
  last.expect_idle();
  last.expect_text({5, 6, 7, 4});
}

void test_errors() {
  Chain draft;
  CHECK(draft.draft({1, -1}, {0, polyspec::kStatusNan}) == (Words{kPadding, kPadding}));
  CHECK(draft.rows.log(0, 0) == (Entry{2, 3, 0, 1, 0, polyspec::kStatusNan}));
  CHECK(draft.stopped());
  CHECK_EQ(3, draft.total());
  draft.expect_idle();

  Chain negative;  // a token of unknown origin
  negative.draft({-1, 4});
  CHECK(negative.rows.log(0, 0) == (Entry{2, 3, 0, 0, 0, polyspec::kStatusTokenOutOfRange}));
  negative.expect_idle();

  Chain verified;
  verified.draft({1, 2});
  const int32_t bits = polyspec::kStatusEmptyRow | polyspec::kStatusDraftRow;
  verified.verify(kMiddle, 1, {1, -1, -1}, bits | polyspec::kStatusZeroResidual);
  CHECK(verified.rows.log(0, 1) == (Entry{2, 3, 1, 0, 0, bits}));
  CHECK(verified.stopped());
  verified.expect_text({5, 6, 7, 1, 2});
  verified.expect_idle();
  verified.rows.next(kTarget, 4);
  verified.rows.report(kTarget, {1, {4}, {0}, {0}, {}});
  CHECK(verified.rows.log(0, 2) == kIdle);

  Chain missing;  // a verification without the token that it owes
  missing.draft({1, 2});
  missing.verify(kMiddle, 1, {1, -1, -1});
  CHECK(missing.rows.log(0, 1) == (Entry{2, 3, 1, 1, 0, polyspec::kStatusTokenOutOfRange}));
  missing.expect_idle();

  for (const int64_t accepted : {-1, 3}) {  // more or fewer than were verified
    Chain wrong;
    wrong.draft({1, 2});
    wrong.verify(kMiddle, accepted, {1, 2, 3});
    CHECK(wrong.rows.log(0, 1) == (Entry{2, 3, accepted, 0, 0, polyspec::kStatusBadLength}));
    CHECK(wrong.stopped());
    wrong.expect_text({5, 6, 7, 1, 2});
  }

  for (int32_t bit = 1; bit < polyspec::kStatusNotes; bit *= 2) {
    Chain any;
    any.draft({1, 2}, {bit, 0});
    CHECK(any.rows.log(0, 0) == (Entry{2, 3, 0, 0, 0, bit}));
    CHECK(any.stopped());
  }
}

void test_notes() {
  Chain c;
  c.draft({1, 2}, {polyspec::kStatusZeroResidual, 0});
  c.verify(kMiddle, 0, {3, -1, -1}, polyspec::kStatusZeroResidual);
  CHECK(c.rows.log(0, 1) == (Entry{2, 3, 0, 1, 0, polyspec::kStatusZeroResidual}));
  CHECK(!c.stopped());
  c.expect_text({5, 6, 7, 3});
  CHECK(c.part(kDrafter));
}

void test_full_log() {
  for (const int64_t steps : {0, 1}) {
    Chain c(100, 40, steps);
    if (steps == 1) c.draft({1, 2});
    CHECK_EQ(steps, c.rows.header(0, Shape::kStep));
    const int32_t level = steps == 1 ? kMiddle : kDrafter;
    CHECK(c.part(level));
    const Words before = c.rows.copy();
    Came came{3, {1, 2, 3}, {}, {0, 0, 0}, {}};
    if (level == kMiddle) came.counts = {2};
    CHECK(c.rows.report(level, came) == Words(3, kPadding));
    CHECK(before == c.rows.copy());
  }
}

void test_full_tail() {
  Chain c(100, 4);  // one slot after the prompt
  c.draft({1, 2});
  CHECK(c.rows.log(0, 0) == (Entry{2, 3, 0, 1, 0, 0}));
  c.expect_text({5, 6, 7, 1});
  CHECK(c.part(kMiddle));  // a token cut off is a proposal less, and not an error
  c.verify(kMiddle, 1, {1, 8, -1});
  CHECK(c.rows.log(0, 1) == (Entry{1, 3, 1, 1, 0, 0}));
  c.expect_text({5, 6, 7, 1});
  CHECK(!c.stopped());

  Chain none(100, 3);
  none.draft({1, 2});
  CHECK(none.rows.log(0, 0) == (Entry{2, 3, 0, 0, 0, 0}));
  CHECK(none.part(kMiddle));
  none.verify(kMiddle, 0, {8});
  none.expect_text({5, 6, 7});
}

void test_width() {
  Chain c;
  c.draft({1, 2});
  CHECK(c.part(kMiddle, 3));
  CHECK(c.rows.next(kMiddle, 2)[0] == (Planned{0, 0, 0, 0, 5, 0, {0, 0}}));
  c.rows.level(0, kMiddle, Shape::kCached) = c.total();  // and with nothing to read
  CHECK(!c.part(kMiddle));
}

// A driver may hand over a row amid a round.
void test_begun_round() {
  Chain c;
  c.rows.level(0, kMiddle, Shape::kPending) = 1;
  c.rows.level(0, kMiddle, Shape::kCached) = 1;  // the token before it is still to be read
  CHECK(c.rows.next(kDrafter, 1)[0] == (Planned{1, 1, 0, 1, 3, 0, {7}}));
  CHECK(c.draft({4}) == (Words{1}));
  CHECK_EQ(2, c.rows.level(0, kMiddle, Shape::kPending));
  CHECK(c.part(kMiddle));
}

void expect_refused(const Result& result, const char* said) {
  CHECK(result.code == Result::Code::kInvalidArgument);
  CHECK(std::string(result.message).find(said) != std::string::npos);
}

// Wrong arguments are refused, and nothing is written.
void test_arguments() {
  Chain c;
  Words input_ids(3, 0), plan(polyspec::kPlanRows, 0), appended(2, 0), tokens(3, 1), counts(1, 0);
  Words found(2, 0);
  std::vector<int32_t> status(3, 0);
  ScheduleDueParams due;
  due.in = c.rows.params();
  due.due = found.data();
  ScheduleNextParams next;
  next.in = c.rows.params();
  next.level = kMiddle;
  next.width = 3;
  next.input_ids = input_ids.data();
  next.plan = plan.data();
  ScheduleReportParams report;
  report.in = next.in;
  report.level = kMiddle;
  report.plan = plan.data();
  report.width = 3;
  report.tokens = tokens.data();
  report.counts = counts.data();
  report.status = status.data();
  report.appended = appended.data();
  const Words before = c.rows.copy();

  const auto refuse_due = [&](const char* said, auto spoil) {
    ScheduleDueParams bad = due;
    spoil(&bad);
    expect_refused(polyspec::schedule_due(bad), said);
  };
  const auto refuse_next = [&](const char* said, auto spoil) {
    ScheduleNextParams bad = next;
    spoil(&bad);
    expect_refused(polyspec::schedule_next(bad), said);
  };
  const auto refuse_report = [&](const char* said, auto spoil) {
    ScheduleReportParams bad = report;
    spoil(&bad);
    expect_refused(polyspec::schedule_report(bad), said);
  };
  const auto refuse_all = [&](const char* said, auto spoil) {
    refuse_due(said, [&](auto* p) { spoil(&p->in); });
    refuse_next(said, [&](auto* p) { spoil(&p->in); });
    refuse_report(said, [&](auto* p) { spoil(&p->in); });
  };
  refuse_all("levels: expected [2, 2^16), given", [](auto* p) { p->shape.levels = 1; });
  refuse_all("levels: expected [2, 2^16), given", [](auto* p) { p->shape.levels = 1 << 16; });
  refuse_all("capacity", [](auto* p) { p->shape.capacity = -1; });
  refuse_all("steps", [](auto* p) { p->shape.steps = -1; });
  refuse_all("batch", [](auto* p) { p->batch = -1; });
  refuse_all("state", [](auto* p) { p->state = nullptr; });
  refuse_due("due", [](auto* p) { p->due = nullptr; });
  for (const int32_t level : {0, 4}) {
    refuse_next("level: expected [1, levels], given", [level](auto* p) { p->level = level; });
    refuse_report("level: expected [1, levels], given", [level](auto* p) { p->level = level; });
  }
  refuse_next("width", [](auto* p) { p->width = 0; });
  refuse_next("input_ids", [](auto* p) { p->input_ids = nullptr; });
  refuse_next("plan", [](auto* p) { p->plan = nullptr; });
  refuse_next("most", [](auto* p) { p->most = -1; });
  refuse_next("pending", [](auto* p) { p->most = 1; });
  refuse_report("width", [](auto* p) { p->width = 0; });
  refuse_report("num_eos", [](auto* p) { p->num_eos = -1; });
  refuse_report("eos", [](auto* p) { p->num_eos = 1; });
  refuse_report("plan", [](auto* p) { p->plan = nullptr; });
  refuse_report("tokens", [](auto* p) { p->tokens = nullptr; });
  refuse_report("status", [](auto* p) { p->status = nullptr; });
  refuse_report("appended", [](auto* p) { p->appended = nullptr; });
  refuse_report("counts", [](auto* p) { p->counts = nullptr; });
  CHECK(before == c.rows.copy());
  CHECK(input_ids == Words(3, 0) && plan == Words(polyspec::kPlanRows, 0) &&
        appended == Words(2, 0));

  due.in.batch = next.in.batch = report.in.batch = 0;  // no row, no memory
  due.in.state = next.in.state = report.in.state = nullptr;
  due.due = next.input_ids = next.plan = report.appended = nullptr;
  report.plan = report.tokens = report.counts = nullptr;
  CHECK(polyspec::schedule_due(due).ok());
  CHECK(polyspec::schedule_next(next).ok());
  CHECK(polyspec::schedule_report(report).ok());
}

// A drafter may propose fewer tokens than it was asked for, or none; never more.
void test_proposed_counts() {
  Chain c;
  CHECK_EQ(1, c.rows.next(kDrafter, 30)[0].part);
  CHECK(c.rows.report(kDrafter, {2, {4, -1}, {1}, {0, 0}, {}}) == (Words{0, kPadding}));
  CHECK(c.rows.log(0, 0) == (Entry{2, 3, 0, 1, 0, 0}));
  CHECK_EQ(1, c.rows.level(0, kMiddle, Shape::kClosed));
  CHECK(c.part(kMiddle));

  Chain none;
  none.rows.next(kDrafter, 30);
  none.rows.report(kDrafter, {1, {-1}, {0}, {0}, {}});
  none.expect_text({5, 6, 7});
  CHECK_EQ(2, none.cached(kDrafter));  // there is a token to read next time
  CHECK(none.part(kMiddle));

  Chain more;
  more.rows.next(kDrafter, 30);
  more.rows.report(kDrafter, {3, {1, 2, 3}, {3}, {0, 0, 0}, {}});
  CHECK(more.stopped());
}

// Invalid words: their row takes no part, stops with an error in its log, and changes in no other
// word. A row of an invalid plan does not write outside either.
void test_words_that_cannot_be() {
  const int64_t most = INT64_MAX, least = INT64_MIN;
  struct Spoiled {
    int64_t word, value;
  };
  const Chain good;
  const Shape shape = good.rows.params().shape;
  std::vector<Spoiled> all;
  for (const int64_t value : {int64_t{-1}, int64_t{41}, most, least})
    all.push_back({Shape::kTotal, value});
  for (const int64_t value : {int64_t{-1}, int64_t{-3}, int64_t{-1000}, least})
    all.push_back({Shape::kStep, value});
  for (const int64_t value : {int64_t{-1}, least}) all.push_back({Shape::kTailWindow, value});
  for (const int64_t value : {int64_t{-1}, int64_t{3}, most, least})
    all.push_back({Shape::kTailPending, value});
  for (int32_t level = kTarget; level <= kDrafter; ++level) {
    const int64_t own = shape.level_at(level);
    for (const int64_t value : {int64_t{-1}, int64_t{-100000}, int64_t{6}, most, least})
      all.push_back({own + Shape::kCached, value});
    for (const int64_t value : {int64_t{-1}, most, least})
      all.push_back({own + Shape::kRound, value});
    for (const int64_t word : {Shape::kWindow, Shape::kBound}) {
      for (const int64_t value : {int64_t{-1}, least})
        if (level != kDrafter) all.push_back({own + word, value});
    }
    for (const int64_t word : {Shape::kPending, Shape::kBlocks}) {
      for (const int64_t value : {int64_t{-1}, most, least})
        if (level != kDrafter) all.push_back({own + word, value});
    }
  }
  for (const Spoiled& spoiled : all) {
    for (int32_t level = kTarget; level <= kDrafter; ++level) {
      Chain c;
      c.draft({1, 2});  // 5 tokens, of which 2 are pending
      c.rows.next(level, 4);
      c.rows.word(0, spoiled.word) = spoiled.value;
      Words wanted = c.rows.copy();
      wanted[Shape::kStopped] = 1;
      if (spoiled.word != Shape::kStep) {
        int64_t* const log = wanted.data() + shape.log_at() + wanted[Shape::kStep]++ * 7;
        std::fill_n(log, 7, 0);
        log[Shape::kStatus] = polyspec::kStatusBadLength;
      }
      if (spoiled.word != Shape::kStep) CHECK_EQ(0, c.rows.next(level, 4)[0].part);
      if (spoiled.word > Shape::kStep && (spoiled.word - shape.level_at(1)) % 7 != Shape::kCached)
        CHECK(c.rows.due()[0] == (std::pair<int64_t, int64_t>(kDrafter, 0)));
      Came came{3, {1, 2, 3}, {1}, {0, 0, 0}, {}};
      CHECK(c.rows.report(level, came) == Words(3, kPadding));
      CHECK(c.rows.copy() == wanted);
      c.expect_idle();
    }
  }
  for (const int64_t count : {int64_t{-1}, int64_t{6}, most, least}) {
    Chain c;
    c.draft({1, 2});
    c.rows.next(kMiddle, 4);
    c.rows.planned(0, polyspec::kPlanLengths) = count;
    c.rows.report(kMiddle, {3, {1, 2, 3}, {2}, {0, 0, 0}, {}});
    CHECK(c.stopped());
    c.expect_text({5, 6, 7, 1, 2});
  }
}

// The rows that the backends are compared on: every call is good, and stays in its buffers.
void test_random_rows() {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const cases::ScheduleNextCase next(seed);
    const cases::ScheduleReportCase report(seed);
    std::vector<unsigned char> out = next.outputs.bytes, rows = report.outputs.bytes;
    CHECK(polyspec::schedule_next(next.params(next.inputs.bytes.data(), out.data())).ok());
    next.check_gaps(out);
    CHECK(polyspec::schedule_report(report.params(report.inputs.bytes.data(), rows.data())).ok());
    report.check_gaps(rows);
#ifndef POLYSPEC_WITH_CUDA
    const polyspec::Stream cuda = polyspec::Stream::on(nullptr);
    CHECK(polyspec::schedule_next(next.params(next.inputs.bytes.data(), out.data()), cuda).code ==
          Result::Code::kUnsupported);
    CHECK(polyspec::schedule_report(report.params(report.inputs.bytes.data(), rows.data()), cuda)
              .code == Result::Code::kUnsupported);
#endif
  }
}

}  // namespace

int main() {
  test_round();
  test_eos();
  test_done();
  test_errors();
  test_notes();
  test_full_log();
  test_full_tail();
  test_width();
  test_begun_round();
  test_arguments();
  test_proposed_counts();
  test_words_that_cannot_be();
  test_random_rows();
  return 0;
}
