// The thread group of fibres: the row algorithms as a block of threads runs them, on a machine
// without a GPU.
#pragma once

#include "core/group.hpp"
#include "cuda_on_cpu/fibre/fibre_machine.hpp"

namespace polyspec::POLYSPEC_CORE {

// One thread of the group.
class FibreGroup {
 public:
  FibreGroup(fibre::Machine& machine, Scratch& scratch, int rank)
      : machine_(machine), scratch_(scratch), rank_(rank) {}

  int rank() const { return machine_.pause(), rank_; }
  int size() const { return machine_.pause(), machine_.size(); }
  int lane() const { return machine_.pause(), rank_ % machine_.lanes(); }
  int lanes() const { return machine_.pause(), machine_.lanes(); }
  int team() const { return machine_.pause(), rank_ / machine_.lanes(); }
  int teams() const { return machine_.pause(), machine_.size() / machine_.lanes(); }

  void sync() { machine_.meet_group(rank_, "sync", 0); }
  void max_and_min(int32_t* high, int32_t* low) {
    *high = best(meet("max", *high), *high, [](auto a, auto b) { return a > b; });
    *low = best(meet("min", *low), *low, [](auto a, auto b) { return a < b; });
  }
  int64_t min(int64_t value) {
    return best(meet("min of 64 bits", value), value, [](auto a, auto b) { return a < b; });
  }
  uint64_t sum(uint64_t value) { return sum_of(meet("sum", value), machine_.size()); }
  uint64_t exclusive_scan(uint64_t value) { return sum_of(meet("exclusive_scan", value), rank_); }
  uint64_t team_sum(uint64_t value) {
    return sum_of(machine_.meet_team(rank_, "team_sum", value), machine_.lanes());
  }
  uint64_t team_exclusive_scan(uint64_t value, uint64_t* total) {
    const std::vector<uint64_t>& all = machine_.meet_team(rank_, "team_exclusive_scan", value);
    *total = sum_of(all, machine_.lanes());
    return sum_of(all, rank_ % machine_.lanes());
  }
  uint64_t* bins() { return scratch().bins; }
  void add(uint64_t* bin, uint64_t value) {
    machine_.pause();
    *bin += value;
  }
  void clear_bins() {
    for (int bin = rank(); bin < kBins; bin += size()) scratch().bins[bin] = 0;
    sync();
  }
  void merge_bins() { sync(); }
  Scratch& scratch() { return machine_.pause(), scratch_; }

 private:
  template <class T>
  const std::vector<uint64_t>& meet(const char* operation, T value) {
    return machine_.meet_group(rank_, operation, static_cast<uint64_t>(value));
  }
  template <class T, class Better>
  static T best(const std::vector<uint64_t>& all, T value, Better better) {
    for (const uint64_t other : all)
      value = better(static_cast<T>(other), value) ? static_cast<T>(other) : value;
    return value;
  }
  static uint64_t sum_of(const std::vector<uint64_t>& all, int n) {
    uint64_t sum = 0;
    for (int i = 0; i < n; ++i) sum += all[i];
    return sum;
  }

  fibre::Machine& machine_;
  Scratch& scratch_;
  int rank_;
};

}  // namespace polyspec::POLYSPEC_CORE
