// Summing a row's masses and finding the token a draw falls on.
//
// The row is cut into at most 1024 tiles of consecutive tokens. A team sums a tile at a time; the
// tile sums stay in scratch, so that inverting the CDF needs one scan over tiles and one walk
// through a single tile. The order is that of token ids whatever the group, which keeps a draw
// independent of how many threads made it (C3).
#pragma once

#include "core/group.hpp"

namespace polyspec::POLYSPEC_CORE {

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

// A lane's share of a tile's mass. (A backend may overload it for its rows.)
template <class Group, class Weight>
POLYSPEC_FN uint64_t lane_mass(Group& group, const Weight& weight, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int64_t i = begin + group.lane(); i < end; i += group.lanes()) sum += weight(i);
  return sum;
}

// Total of weight(i), i in [0, n), leaving the tile sums in scratch. Collective.
template <class Group, class Weight>
POLYSPEC_FN uint64_t sum_tiles(Group& group, int64_t n, const Weight& weight) {
  const Tiling tiling(n);
  uint64_t* tiles = group.scratch().tiles;
  uint64_t mine = 0;
  for (int64_t tile = group.team(); tile < tiling.count; tile += group.teams()) {
    const uint64_t sum =
        group.team_sum(lane_mass(group, weight, tiling.begin(tile), tiling.end(tile)));
    if (group.lane() == 0) {
      tiles[tile] = sum;
      mine += sum;
    }
  }
  return group.sum(mine);  // a barrier too: the tile sums are seen after it
}

// The token of a tile whose mass covers `rest`: the first i of it whose running sum exceeds that.
// Collective over a team; the result is in every lane.
template <class Group, class Weight>
POLYSPEC_FN int64_t token_in_tile(Group& group, const Tiling& tiling, int64_t tile,
                                  const Weight& weight, uint64_t rest) {
  int64_t begin = tiling.begin(tile);
  int64_t end = tiling.end(tile);
  // Each lane sums a run of consecutive tokens; the run that covers the rest is cut up in turn.
  while (group.lanes() > 1 && end - begin > group.lanes()) {
    const int64_t length = (end - begin + group.lanes() - 1) / group.lanes();
    const int64_t from = begin + length * group.lane();
    const int64_t to = from + length < end ? from + length : end;
    uint64_t mass = 0;
    POLYSPEC_ROLLED
    for (int64_t i = from; i < to; ++i) mass += weight(i);
    uint64_t total;
    const uint64_t lower = group.team_exclusive_scan(mass, &total);
    const bool covers = lower <= rest && rest - lower < mass;
    rest -= group.team_sum(covers ? lower : 0);
    begin = static_cast<int64_t>(group.team_sum(covers ? static_cast<uint64_t>(from) : 0));
    end = begin + length < end ? begin + length : end;
  }
  uint64_t passed = 0;
  uint64_t token = 0;
  POLYSPEC_ROLLED
  for (int64_t start = begin; start < end && passed <= rest; start += group.lanes()) {
    const int64_t i = start + group.lane();
    const uint64_t mass = i < end ? weight(i) : 0;
    uint64_t total;
    const uint64_t lower = passed + group.team_exclusive_scan(mass, &total);
    if (lower <= rest && rest - lower < mass) token = static_cast<uint64_t>(i);
    passed += total;
  }
  return static_cast<int64_t>(group.team_sum(token));
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
  POLYSPEC_ROLLED
  for (int64_t tile = first; tile < last; ++tile) mine += scratch.tiles[tile];
  uint64_t before = group.exclusive_scan(mine);
  if (before <= target && target - before < mine) {
    int64_t tile = first;
    while (target - before >= scratch.tiles[tile]) before += scratch.tiles[tile++];
    scratch.found[0] = static_cast<uint64_t>(tile);
    scratch.found[1] = target - before;
  }
  group.sync();
  if (group.team() == 0) {
    const int64_t tile = static_cast<int64_t>(scratch.found[0]);
    const int64_t token = token_in_tile(group, tiling, tile, weight, scratch.found[1]);
    if (group.lane() == 0) scratch.found[2] = static_cast<uint64_t>(token);
  }
  group.sync();
  return static_cast<int64_t>(scratch.found[2]);
}

// `pick` by one team: teams may pick at once, each for a target of its own. The tile sums only are
// read. Collective over the team; the result is in every lane.
template <class Group, class Weight>
POLYSPEC_FN int64_t team_pick(Group& group, int64_t n, const Weight& weight, uint64_t target) {
  const Tiling tiling(n);
  const uint64_t* tiles = group.scratch().tiles;
  const int64_t run = (tiling.count + group.lanes() - 1) / group.lanes();
  const int64_t first = run * group.lane();
  const int64_t last = first + run < tiling.count ? first + run : tiling.count;
  uint64_t mine = 0;
  POLYSPEC_ROLLED
  for (int64_t tile = first; tile < last; ++tile) mine += tiles[tile];
  uint64_t total;
  uint64_t before = group.team_exclusive_scan(mine, &total);
  uint64_t tile = 0;
  uint64_t rest = 0;
  if (before <= target && target - before < mine) {
    tile = static_cast<uint64_t>(first);
    while (target - before >= tiles[tile]) before += tiles[tile++];
    rest = target - before;
  }
  tile = group.team_sum(tile);
  rest = group.team_sum(rest);
  return token_in_tile(group, tiling, static_cast<int64_t>(tile), weight, rest);
}

}  // namespace polyspec::POLYSPEC_CORE
