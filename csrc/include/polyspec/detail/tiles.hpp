// Summing a row's masses and finding the token a draw falls on.
//
// The row is cut into at most 1024 tiles of consecutive tokens. A team sums a tile at a time; the
// tile sums stay in scratch, so that inverting the CDF needs one scan over tiles and one walk
// through a single tile. The order is that of token ids whatever the group, which keeps a draw
// independent of how many threads made it (C3).
#pragma once

#include "polyspec/detail/group.hpp"

namespace polyspec::POLYSPEC_DETAIL {

struct Tiling {
  int64_t n;
  int64_t width;  // tokens per tile, a multiple of 1024
  int64_t count;

  POLYSPEC_FN explicit Tiling(int64_t tokens)
      : n(tokens),
        width(1024 * ((tokens + (1 << 20) - 1) >> 20)),
        count((tokens + width - 1) / width) {}
  POLYSPEC_FN int64_t begin(int64_t tile) const { return tile * width; }
  POLYSPEC_FN int64_t end(int64_t tile) const {
    return n - tile * width < width ? n : (tile + 1) * width;
  }
};

// Total of weight(i), i in [0, n), leaving the tile sums in scratch. Collective.
template <class Group, class Weight>
POLYSPEC_FN uint64_t sum_tiles(Group& group, int64_t n, const Weight& weight) {
  const Tiling tiling(n);
  uint64_t* tiles = group.scratch().tiles;
  for (int64_t tile = group.team(); tile < tiling.count; tile += group.teams()) {
    const int64_t end = tiling.end(tile);
    uint64_t sum = 0;
    for (int64_t i = tiling.begin(tile) + group.lane(); i < end; i += group.lanes())
      sum += weight(i);
    sum = group.team_sum(sum);
    if (group.lane() == 0) tiles[tile] = sum;
  }
  group.sync();
  uint64_t mine = 0;
  for (int64_t tile = group.rank(); tile < tiling.count; tile += group.size()) mine += tiles[tile];
  return group.sum(mine);
}

// The token whose mass covers `target`: the first i with weight(0) + ... + weight(i) > target.
// Needs the tile sums of the same weights in scratch and target < their total. Collective; the
// result is in every thread.
template <class Group, class Weight>
POLYSPEC_FN int64_t pick(Group& group, int64_t n, const Weight& weight, uint64_t target) {
  const Tiling tiling(n);
  Scratch& scratch = group.scratch();
  // Each thread takes a run of consecutive tiles; the one whose run covers the target looks into
  // it.
  const int64_t run = (tiling.count + group.size() - 1) / group.size();
  const int64_t first = run * group.rank();
  const int64_t last = first + run < tiling.count ? first + run : tiling.count;
  uint64_t mine = 0;
  for (int64_t tile = first; tile < last; ++tile) mine += scratch.tiles[tile];
  uint64_t before = group.exclusive_scan(mine);
  if (before <= target && target - before < mine) {
    int64_t tile = first;
    while (target - before >= scratch.tiles[tile]) before += scratch.tiles[tile++];
    scratch.found[0] = static_cast<uint64_t>(tile);
    scratch.found[1] = target - before;
  }
  group.sync();
  const int64_t tile = static_cast<int64_t>(scratch.found[0]);
  const uint64_t rest = scratch.found[1];
  if (group.team() == 0) {
    const int64_t end = tiling.end(tile);
    uint64_t passed = 0;
    for (int64_t start = tiling.begin(tile); start < end && passed <= rest;
         start += group.lanes()) {
      const int64_t i = start + group.lane();
      const uint64_t mass = i < end ? weight(i) : 0;
      uint64_t total;
      const uint64_t lower = passed + group.team_exclusive_scan(mass, &total);
      if (lower <= rest && rest - lower < mass) scratch.found[2] = static_cast<uint64_t>(i);
      passed += total;
    }
  }
  group.sync();
  return static_cast<int64_t>(scratch.found[2]);
}

}  // namespace polyspec::POLYSPEC_DETAIL
