// What a Scheduler must say next, for its tests.
#pragma once

#include "polyspec/scheduler.hpp"
#include "support/check.hpp"

namespace scheduler_steps {

using polyspec::Scheduler;
using polyspec::Step;

inline void expect(const Scheduler& scheduler, Step::Kind kind, int32_t level, int64_t count) {
  const Step step = scheduler.next();
  CHECK_EQ(static_cast<int32_t>(kind), static_cast<int32_t>(step.kind));
  CHECK_EQ(level, step.level);
  CHECK_EQ(count, step.count);
}
inline void expect_draft(const Scheduler& s, int32_t level, int64_t count) {
  expect(s, Step::Kind::kDraft, level, count);
}
inline void expect_verify(const Scheduler& s, int32_t level, int64_t count) {
  expect(s, Step::Kind::kVerify, level, count);
}
inline void expect_done(const Scheduler& s) {
  expect(s, Step::Kind::kDone, 0, 0);
  CHECK(s.done());
}

}  // namespace scheduler_steps
