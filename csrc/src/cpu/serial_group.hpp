// The thread group of one: what the row algorithms run on in the CPU backend.
#pragma once

#include "polyspec/detail/group.hpp"

namespace polyspec::POLYSPEC_DETAIL {

class SerialGroup {
 public:
  static constexpr bool kSerial = true;

  explicit SerialGroup(Scratch& scratch) : scratch_(scratch) {}

  POLYSPEC_FN static constexpr int rank() { return 0; }
  POLYSPEC_FN static constexpr int size() { return 1; }
  POLYSPEC_FN static constexpr int lane() { return 0; }
  POLYSPEC_FN static constexpr int lanes() { return 1; }
  POLYSPEC_FN static constexpr int team() { return 0; }
  POLYSPEC_FN static constexpr int teams() { return 1; }
  POLYSPEC_FN static void sync() {}
  POLYSPEC_FN static int32_t max(int32_t value) { return value; }
  POLYSPEC_FN static int32_t min(int32_t value) { return value; }
  POLYSPEC_FN static int64_t min(int64_t value) { return value; }
  POLYSPEC_FN static uint64_t sum(uint64_t value) { return value; }
  POLYSPEC_FN static uint64_t exclusive_scan(uint64_t) { return 0; }
  POLYSPEC_FN static uint64_t team_sum(uint64_t value) { return value; }
  POLYSPEC_FN static uint64_t team_exclusive_scan(uint64_t value, uint64_t* total) {
    *total = value;
    return 0;
  }
  POLYSPEC_FN static void add(uint64_t* shared, uint64_t value) { *shared += value; }
  POLYSPEC_FN Scratch& scratch() { return scratch_; }

 private:
  Scratch& scratch_;
};

}  // namespace polyspec::POLYSPEC_DETAIL
