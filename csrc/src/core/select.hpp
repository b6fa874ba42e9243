// Radix select: the logit at which the weight of the larger-or-equal logits first reaches a wanted
// total.
//
// With weight 1 this is the k-th largest logit (top-k); with a token's mass it is the edge of the
// nucleus (top-p). No sorting: three histograms of the float's ordered bits, 11 + 11 + 10
// (bfloat16's have 11 + 5). The histogram adds integers, so it does not matter in which order
// threads reach a bin, and tokens that tie at the edge share a key and stay together.
#pragma once

#include "core/group.hpp"
#include "core/row.hpp"

namespace polyspec::POLYSPEC_CORE {

// A bin, and how much of the wanted mass is left for it.
struct Bin {
  int number;
  uint64_t need;
};

// Largest bin d with bins[d] + bins[d + 1] + ... >= need, where need <= the total. Collective; one
// scan over the group. (A backend may overload it for its groups.)
template <class Group>
POLYSPEC_FN Bin bin_from_top(Group& group, uint64_t need) {
  Scratch& scratch = group.scratch();
  group.sync();  // all are counted
  const int run = (kBins + group.size() - 1) / group.size();
  const int top = kBins - 1 - run * group.rank();  // each thread takes a run of bins, downwards
  const int bottom = top - run + 1 > 0 ? top - run + 1 : 0;
  uint64_t mine = 0;
  POLYSPEC_ROLLED
  for (int bin = top; bin >= bottom; --bin) mine += group.bin(bin);
  uint64_t above = group.exclusive_scan(mine);
  if (above < need && need - above <= mine) {
    int bin = top + 1;
    uint64_t weight = 0;
    POLYSPEC_ROLLED
    do {
      above += weight;
      weight = group.bin(--bin);
    } while (need - above > weight);
    scratch.found[0] = static_cast<uint64_t>(bin);
    scratch.found[1] = need - above;
  }
  group.sync();  // the bin is found
  return {static_cast<int>(scratch.found[0]), scratch.found[1]};
}

// One digit of a key: its offset in the key, and its largest value.
struct Digit {
  uint32_t prefix;  // the digits above, zeros below
  int shift;
  uint32_t most;

  // Of a key with this prefix the digit, of others more than the largest.
  POLYSPEC_FN uint32_t of(uint32_t key) const { return (key ^ prefix) >> shift; }
};

// Adds the weights of the tokens that this thread looks at to the group's histogram. (A backend may
// overload it for its rows.)
template <class Group, class AnyRowType, class Weight>
POLYSPEC_FN void count_digit(Group& group, const AnyRowType& row, const Weight& weight,
                             const Digit& digit) {
  uint64_t* bins = group.bins();
  POLYSPEC_ROLLED
  for (int64_t i = group.rank(); i < row.n; i += group.size()) {
    const uint32_t bin = digit.of(key_of(row[i]));
    if (bin <= digit.most) group.add(&bins[bin], weight(i));
  }
}

// Low bits of a key that its sign determines, all 0 where it is positive and all 1 where it is
// negative: the digits stop before them.
template <class Element>
constexpr int kToldBits = 0;
template <>
inline constexpr int kToldBits<Float16> = 10;  // 13, but two digits have 22
template <>
inline constexpr int kToldBits<BFloat16> = 16;

// Digit number i after the digits in `prefix`.
template <class Element>
POLYSPEC_FN Digit digit_of(int i, uint32_t prefix) {
  if (i == 0) return {prefix, 21, 2047};
  constexpr int kSecond = kToldBits<Element> > 10 ? kToldBits<Element> : 10;
  return i == 1 ? Digit{prefix, kSecond, (1u << (21 - kSecond)) - 1} : Digit{prefix, 0, 1023};
}

// Largest logit t of the row with sum of weight(i) over row[i] >= t reaching `need`, 1 <= need <=
// sum of all weights. Collective.
template <class Group, class AnyRowType, class Weight>
POLYSPEC_FN float select_from_top(Group& group, const AnyRowType& row, const Weight& weight,
                                  uint64_t need) {
  using Element = typename AnyRowType::Element;
  constexpr int kTold = kToldBits<Element>;
  uint32_t prefix = 0;
  POLYSPEC_ROLLED
  for (int i = 0; i < (kTold == 0 ? 3 : 2); ++i) {
    const Digit digit = digit_of<Element>(i, prefix);
    group.clear_bins();
    count_digit(group, row, weight, digit);
    const Bin found = bin_from_top(group, need);
    need = found.need;
    prefix |= static_cast<uint32_t>(found.number) << digit.shift;
  }
  if (prefix >> 31 == 0) prefix |= (1u << kTold) - 1;
  return value_of_key(prefix);
}

}  // namespace polyspec::POLYSPEC_CORE
