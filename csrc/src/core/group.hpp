// The thread-group concept and the scratch a group shares.
//
// A row algorithm is written once over a group of cooperating threads: one CPU thread, a CUDA
// block, a cluster of them. Only the reductions differ. Integers are the only things added up, so
// all give the same bits. Loops over a row are POLYSPEC_ROLLED here: backends have faster loops for
// the common rows, and unrolling these as well would only make kernels large.
//
// Members of a group:
//   - rank(), size(): this thread and the number of threads
//   - lane(), lanes(): this thread within its team, and the team's size (a warp on CUDA)
//   - team(), teams(): the team's index and the number of teams; rank = team * lanes + lane
//   - sync(): barrier of the group; writes to scratch before it are seen after it
//   - max_both(int32_t*, int32_t*): two maxima over the group, in every thread
//   - min(int64_t), sum(uint64_t): over the group, in every thread
//   - exclusive_scan(uint64_t): sum over lower ranks
//   - team_sum(uint64_t): over the team, in every lane
//   - team_exclusive_scan(uint64_t): sum over lower lanes
//   - by_one_team(f): in every thread the result of f() in one team, or in one team of each part of
//   the group. Between two calls there has to be a barrier
//   - scratch(): the Scratch that the group shares
//   - bins(): the histogram that this thread adds to, which only a part of the group may share;
//   bin(int): a bin, added up over all histograms
//   - add(uint64_t* bin, uint64_t): atomic add to a bin of bins()
//   - kEndings: how many rows of a block it remembers (block_rules.hpp); more than 1 need memory of
//   each thread
//   - clear_bins(): zeroes the histogram of bins(). A barrier for the threads that share it
//
// Every member but rank ... teams, scratch, bins, bin and add is collective: all threads of the
// group (team) call it together. The group's reductions and its scan are barriers as well: values
// that a thread reads before a barrier may be overwritten after it.
//
// A backend may overload row algorithms (functions over a row or a weight) for its group type,
// where a faster way gives the same bits; the overloads are found through the group's namespace.
#pragma once

#include "core/numeric.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int kMaxTiles = 1024;  // tiles of a row, see tiles.hpp
constexpr int kBins = 2048;      // bins of one radix-select digit

struct Scratch {
  uint64_t tiles[kMaxTiles];  // mass of each tile
  uint64_t bins[kBins];       // histogram of one digit
  uint64_t found[3];          // written by the thread that found it, read by the others
};

}  // namespace polyspec::POLYSPEC_CORE
