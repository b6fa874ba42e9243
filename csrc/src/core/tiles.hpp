// Summing a row's masses and finding the token a draw falls on.
//
// The row is cut into at most 1024 tiles of consecutive tokens. A team sums a tile at a time; the
// tile sums stay in scratch, so that inverting the CDF needs one walk over tiles and one
// through a single tile. The order is that of token ids for every group, which keeps a draw
// independent of the number of threads (C3).
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

// The mass of the tokens in [begin, end), by one lane. (A backend may overload it for its rows.)
template <class Weight>
POLYSPEC_FN uint64_t run_mass(const Weight& weight, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  POLYSPEC_ROLLED
  for (int64_t i = begin; i < end; ++i) sum += weight(i);
  return sum;
}

// The token with the mass that covers `target`: the first i with weight(0) + ... + weight(i) >
// target. `tiles`: the tile sums of the same weights, which add up to more than the target, and are
// only read, so that teams may pick at once, each for a separate target. Collective over a team of
// more than one lane; the result is in every lane.
template <class Group, class Weight>
POLYSPEC_FN int64_t token_at(const Group& group, int64_t n, const Weight& weight,
                             const uint64_t* tiles, uint64_t target) {
  const Tiling tiling(n);
  bool of_tiles = true;
  int64_t begin = 0;
  int64_t end = tiling.count;
  // Each lane sums a run of consecutive tiles, later of tokens; the run that covers the rest of the
  // target is cut up in turn.
  POLYSPEC_ROLLED
  for (;;) {
    const int64_t length = (end - begin + group.lanes() - 1) / group.lanes();
    int64_t from = begin + length * group.lane();
    from = from < end ? from : end;
    const int64_t to = from + length < end ? from + length : end;
    uint64_t mass = 0;
    if (of_tiles) {
      POLYSPEC_ROLLED
      for (int64_t tile = from; tile < to; ++tile) mass += tiles[tile];
    } else {
      mass = run_mass(weight, from, to);
    }
    const uint64_t lower = group.team_exclusive_scan(mass);
    const bool covers = lower <= target && target - lower < mass;
    target -= group.team_sum(covers ? lower : 0);
    begin = static_cast<int64_t>(group.team_sum(covers ? static_cast<uint64_t>(from) : 0));
    end = begin + length < end ? begin + length : end;
    if (length > 1) continue;
    if (!of_tiles) return begin;
    of_tiles = false;
    end = tiling.end(begin);
    begin = tiling.begin(begin);
  }
}

// The same with the tile sums in scratch. (A backend may overload it.)
template <class Group, class Weight>
POLYSPEC_FN int64_t team_pick(Group& group, int64_t n, const Weight& weight, uint64_t target) {
  return token_at(group, n, weight, group.scratch().tiles, target);
}

// The same for the whole group. Collective; the result is in every thread.
template <class Group, class Weight>
POLYSPEC_FN int64_t pick(Group& group, int64_t n, const Weight& weight, uint64_t target) {
  return group.by_one_team([&] { return team_pick(group, n, weight, target); });
}

}  // namespace polyspec::POLYSPEC_CORE
