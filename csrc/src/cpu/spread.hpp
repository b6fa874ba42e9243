// Work that is spread over the caller's threads.
#pragma once

#include <algorithm>

#include "polyspec/types.hpp"

namespace polyspec::cpu {

// body(begin, end) for ranges of `each` of [0, count).
template <class Body>
void spread(const Executor& executor, int64_t count, int64_t each, const Body& body) {
  const int64_t tasks = (count + each - 1) / each;
  if (executor.run == nullptr || tasks < 2) return body(0, count);
  struct Call {
    const Body* body;
    int64_t count, each;
  } call{&body, count, each};
  executor.run(
      executor.pool, tasks,
      [](void* context, int64_t task) {
        const Call& mine = *static_cast<const Call*>(context);
        const int64_t begin = task * mine.each;
        (*mine.body)(begin, std::min(begin + mine.each, mine.count));
      },
      &call);
}

// body(first, count) for passes of at most `most` of so many rows, of one size as nearly as may be.
template <class Body>
void in_passes(int64_t rows, int64_t most, const Body& body) {
  const int64_t passes = (rows + most - 1) / most;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = rows * pass / passes;
    body(first, rows * (pass + 1) / passes - first);
  }
}

}  // namespace polyspec::cpu
