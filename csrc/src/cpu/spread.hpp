// A product's output tiles, spread over the caller's threads.
#pragma once

#include <algorithm>

#include "polyspec/types.hpp"

namespace polyspec::cpu {

// body(begin, end) for ranges of `each` tiles.
template <class Body>
void spread_tiles(const Executor& executor, int64_t tiles, int64_t each, const Body& body) {
  const int64_t tasks = (tiles + each - 1) / each;
  if (executor.run == nullptr || tasks < 2) return body(0, tiles);
  struct Call {
    const Body* body;
    int64_t tiles, each;
  } call{&body, tiles, each};
  executor.run(
      executor.pool, tasks,
      [](void* context, int64_t task) {
        const Call& mine = *static_cast<const Call*>(context);
        const int64_t begin = task * mine.each;
        (*mine.body)(begin, std::min(begin + mine.each, mine.tiles));
      },
      &call);
}

}  // namespace polyspec::cpu
