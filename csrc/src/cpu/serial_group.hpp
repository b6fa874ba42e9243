// The thread group of one, for the row algorithms of the CPU backend. A row's loops may still be
// spread over the caller's threads, see row_tasks.hpp.
#pragma once

#include "core/group.hpp"

namespace polyspec::POLYSPEC_CORE {

class SerialGroup {
 public:
  static constexpr int kEndings = 8;

  // Without an executor everything happens on this thread.
  explicit SerialGroup(Scratch& scratch, const Executor* executor = nullptr)
      : scratch_(scratch), executor_(executor) {}

  POLYSPEC_FN static constexpr int rank() { return 0; }
  POLYSPEC_FN static constexpr int size() { return 1; }
  POLYSPEC_FN static constexpr int lane() { return 0; }
  POLYSPEC_FN static constexpr int lanes() { return 1; }
  POLYSPEC_FN static constexpr int team() { return 0; }
  POLYSPEC_FN static constexpr int teams() { return 1; }
  POLYSPEC_FN static void sync() {}
  POLYSPEC_FN static void max_both(int32_t*, int32_t*) {}
  POLYSPEC_FN static int64_t min(int64_t value) { return value; }
  POLYSPEC_FN static uint64_t sum(uint64_t value) { return value; }
  POLYSPEC_FN static uint64_t exclusive_scan(uint64_t) { return 0; }
  POLYSPEC_FN static uint64_t team_sum(uint64_t value) { return value; }
  POLYSPEC_FN static uint64_t team_exclusive_scan(uint64_t) { return 0; }
  template <class F>
  POLYSPEC_FN static int64_t by_one_team(const F& f) {
    return f();
  }
  POLYSPEC_FN uint64_t* bins() { return scratch_.bins; }
  POLYSPEC_FN uint64_t bin(int bin) const { return scratch_.bins[bin]; }
  POLYSPEC_FN static void add(uint64_t* bin, uint64_t value) { *bin += value; }
  POLYSPEC_FN void clear_bins() {
    for (uint64_t& bin : scratch_.bins) bin = 0;
  }
  POLYSPEC_FN Scratch& scratch() { return scratch_; }
  POLYSPEC_FN const Executor* executor() const { return executor_; }

 private:
  Scratch& scratch_;
  const Executor* executor_;
};

}  // namespace polyspec::POLYSPEC_CORE
