// The row algorithms of core/ overloaded for the group of one: whole-row loops that vectorise
// and, with an executor, run on the caller's threads. The sums are integers, so neither the vectors
// nor the threads change a bit.
#pragma once

#include <algorithm>

#include "cpu/float_mode.hpp"
#include "cpu/residual_loops.hpp"
#include "cpu/select_loops.hpp"

namespace polyspec::POLYSPEC_CORE {

// A task should outlast its hand-over to another thread: 8192 tokens take about 3 us.
constexpr int64_t kTilesPerTask = 8;
constexpr int64_t kFewestTasks = 4;

// body(first, last) over tiles [0, count), cut into tasks; returns the number of tasks. Task i
// begins at tile i * kTilesPerTask.
template <class Body>
int64_t over_tiles(const SerialGroup& group, int64_t count, const Body& body) {
  const int64_t tasks = (count + kTilesPerTask - 1) / kTilesPerTask;
  const Executor* executor = group.executor();
  if (executor == nullptr || tasks < kFewestTasks) {
    body(int64_t{0}, count);
    return 1;
  }
  struct Work {
    const Body* body;
    int64_t count;
  } work{&body, count};
  executor->run(
      executor->pool, tasks,
      [](void* context, int64_t task) {
        const FloatMode mode;  // of this thread
        const Work& mine = *static_cast<const Work*>(context);
        const int64_t first = task * kTilesPerTask;
        (*mine.body)(first, std::min(first + kTilesPerTask, mine.count));
      },
      &work);
  return tasks;
}

template <class RowType>
int32_t largest_order(SerialGroup& group, const RowType& row) {
  const Tiling tiling(row.n);
  Extremes found[kMaxTiles / kTilesPerTask];
  const int64_t tasks = over_tiles(group, tiling.count, [&](int64_t first, int64_t last) {
    found[first / kTilesPerTask] = with_type(row, [&](const auto& typed) {
      return typed_extremes(typed, tiling.begin(first), tiling.end(last - 1));
    });
  });
  int32_t most = kOrderMinusInfinity;
  for (int64_t i = 0; i < tasks; ++i)
    most = std::max({most, found[i].high, order_or_nan(found[i].low)});
  return most;
}

template <class T>
int64_t typed_first(const Row<T>& row, float max) {
  Plain<T> block[room_for_span<T>(kMaskedBlock)];
  for (int64_t begin = 0; begin < row.n; begin += kMaskedBlock) {
    const int64_t n = std::min<int64_t>(kMaskedBlock, row.n - begin);
    const Plain<T>* logits = span_of(row, begin, n, block);
    if (!any_equal_loop(logits, n, max)) continue;
    for (int64_t i = 0; i < n; ++i) {
      if (to_float(logits[i]) == max) return begin + i;
    }
  }
  return row.n;
}
template <class RowType>
int64_t first_of(SerialGroup&, const RowType& any, float max) {
  return with_type(any, [&](const auto& row) { return typed_first(row, max); });
}

template <class Weight>
uint64_t sum_tiles(SerialGroup& group, int64_t n, const Weight& weight) {
  const Tiling tiling(n);
  uint64_t* tiles = group.scratch().tiles;
  over_tiles(group, tiling.count, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile)
      tiles[tile] = mass_between(weight, tiling.begin(tile), tiling.end(tile));
  });
  uint64_t sum = 0;
  for (int64_t tile = 0; tile < tiling.count; ++tile) sum += tiles[tile];
  return sum;
}

// Tiles, then steps of 128 tokens in vectors, then one token at a time. The bounds hold even where
// a distribution handed over does not belong to its row, so that nothing past the vocabulary is
// picked.
template <class Weight>
int64_t team_pick(SerialGroup& group, int64_t n, const Weight& weight, uint64_t target) {
  constexpr int64_t kStep = 128;
  const Tiling tiling(n);
  const uint64_t* tiles = group.scratch().tiles;
  int64_t tile = 0;
  for (; tile + 1 < tiling.count && target >= tiles[tile]; ++tile) target -= tiles[tile];
  int64_t i = tiling.begin(tile);
  const int64_t end = tiling.end(tile);
  for (; i + kStep < end; i += kStep) {
    const uint64_t mass = mass_between(weight, i, i + kStep);
    if (target < mass) break;
    target -= mass;
  }
  for (; i + 1 < end; ++i) {
    const uint64_t mass = weight(i);
    if (target < mass) break;
    target -= mass;
  }
  return i;
}

}  // namespace polyspec::POLYSPEC_CORE
