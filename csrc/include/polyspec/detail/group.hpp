// The thread-group concept and the scratch a group shares.
//
// A row algorithm is written once over a group of cooperating threads: one CPU thread, a CUDA
// block, or test fibres. Only the reductions differ. Integers are the only things added up, so all
// give the same bits.
//
// What a group has to offer:
//   - kSerial: whether the group is one thread, whose loops the compiler vectorises
//   - rank(), size(): this thread and the number of threads
//   - lane(), lanes(): this thread within its team, and the team's size (a warp on CUDA)
//   - team(), teams(): the team's index and the number of teams; rank = team * lanes + lane
//   - sync(): barrier of the group; writes to scratch before it are seen after it
//   - max(int32_t), min(int32_t), min(int64_t), sum(uint64_t): over the group, in every thread
//   - exclusive_scan(uint64_t): sum over lower ranks
//   - team_sum(uint64_t): over the team, in every lane
//   - team_exclusive_scan(uint64_t, uint64_t* total): sum over lower lanes; total in every lane
//   - add(uint64_t* shared, uint64_t): atomic add to scratch
//   - scratch(): the Scratch that the group shares
//
// Every member but rank ... teams, add and scratch is collective: all threads of the group (team)
// call it together. The group's reductions and its scan are barriers as well: what a thread reads
// before one may be overwritten after.
#pragma once

#include "polyspec/detail/numeric.hpp"

namespace polyspec::POLYSPEC_DETAIL {

constexpr int kMaxTiles = 1024;  // tiles of a row, see tiles.hpp
constexpr int kBins = 2048;      // bins of one radix-select digit

struct Scratch {
  uint64_t tiles[kMaxTiles];  // mass of each tile
  uint64_t bins[kBins];       // histogram of one digit
  uint64_t found[3];          // what the one thread that found it tells the others
};

}  // namespace polyspec::POLYSPEC_DETAIL
