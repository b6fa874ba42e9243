// The radix select of core/select.hpp overloaded for the group of one: as few tokens as possible
// reach a histogram, with scattered additions that do not vectorise.
//
//   - top-k: the largest logit of each of 2048 columns of the row; the k-th largest of these maxima
//   is a lower bound of the k-th largest of all logits.
//   - top-p after top-k: tokens cut by top-k have no mass.
//   - otherwise, after the first digit only the tokens of its bin are left.
//
// The tokens left are copied out, and the digits are found on the copy; where they are too many, on
// the row. Either way the result is that of three histograms over the whole row.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/row_loops.hpp"
#include "cpu/serial_group.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kSelectStep = 256;
constexpr int64_t kColumns = 2048;
constexpr uint64_t kColumnsTopK = 512;  // a larger k would leave many more tokens than k
constexpr int64_t kCandidates = 16384;

struct Candidates {
  float logits[kCandidates];
  int64_t count;
};

template <class T>
POLYSPEC_LOOP int64_t count_in_loop(const T* data, int64_t n, uint32_t low, uint32_t span) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += key_of(to_float(data[i])) - low <= span ? 1u : 0u;
  return count;
}

// Copies the logits with a key in [low, low + span]; false: they are too many.
template <class T>
bool collect(const Row<T>& row, uint32_t low, uint32_t span, Candidates* found) {
  found->count = 0;
  Plain<T> block[room_for_span<T>(kSelectStep)];
  for (int64_t begin = 0; begin < row.n; begin += kSelectStep) {
    const int64_t n = std::min(kSelectStep, row.n - begin);
    const Plain<T>* logits = span_of(row, begin, n, block);
    if (count_in_loop(logits, n, low, span) == 0) continue;
    if (found->count + kSelectStep > kCandidates) return false;
    for (int64_t i = 0; i < n; ++i) {
      const float z = to_float(logits[i]);
      found->logits[found->count] = z;  // no branch: overwritten by the next if it is not in
      found->count += key_of(z) - low <= span ? 1 : 0;
    }
  }
  return true;
}

template <class T>
POLYSPEC_LOOP void column_max_loop(const T* data, int64_t n, float* columns) {
  for (int64_t i = 0; i < n; ++i) {
    const float z = to_float(data[i]);
    columns[i] = z > columns[i] ? z : columns[i];
  }
}

template <class T>
void column_maxima(const Row<T>& row, float* columns) {
  for (int64_t i = 0; i < kColumns; ++i) columns[i] = -kInfinity;
  Plain<T> block[room_for_span<T>(kColumns)];
  for (int64_t begin = 0; begin < row.n; begin += kColumns) {
    const int64_t n = std::min(kColumns, row.n - begin);
    column_max_loop(span_of(row, begin, n, block), n, columns);
  }
}

POLYSPEC_FN One weight_over(One, const Row<float>&) { return {}; }
template <class RowType>
POLYSPEC_FN TokenMass<Row<float>> weight_over(const TokenMass<RowType>& weight,
                                              const Row<float>& row) {
  return over(weight, row);
}

template <class T, class Weight>
POLYSPEC_LOOP void count_digit(SerialGroup& group, const Row<T>& row, const Weight& weight,
                               const Digit& given) {
  const Digit digit = given;
  uint32_t keys[kSelectStep];
  uint64_t masses[kSelectStep];
  uint64_t* bins = group.bins();
  Plain<T> block[room_for_span<T>(kSelectStep)];
  for (int64_t begin = 0; begin < row.n; begin += kSelectStep) {
    const int64_t n = std::min(kSelectStep, row.n - begin);
    key_loop(span_of(row, begin, n, block), n, keys);
    if constexpr (!std::is_same_v<Weight, One>) masses_of(weight, begin, n, masses);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bin = digit.of(keys[i]);
      if (bin > digit.most) continue;
      if constexpr (std::is_same_v<Weight, One>) {
        ++bins[bin];
      } else {
        bins[bin] += masses[i];
      }
    }
  }
}

// Finds the digits [from, to) after the digits in `prefix`, and the rest of `need`.
template <class RowType, class Weight>
void find_digits(SerialGroup& group, const RowType& row, const Weight& weight, int from, int to,
                 uint32_t* prefix, uint64_t* need) {
  constexpr int kShift[] = {21, 10, 0};
  constexpr uint32_t kMost[] = {2047, 2047, 1023};
  for (int i = from; i < to; ++i) {
    group.clear_bins();
    count_digit(group, row, weight, Digit{*prefix, kShift[i], kMost[i]});
    const Bin found = bin_from_top(group, *need);
    *need = found.need;
    *prefix |= static_cast<uint32_t>(found.number) << kShift[i];
  }
}

// Key below which no token can matter; 0: none known.
template <class T>
uint32_t lowest_key(SerialGroup& group, const Row<T>& row, One, uint64_t need) {
  if (need > kColumnsTopK || row.n <= kCandidates) return 0;
  float columns[kColumns];
  column_maxima(row, columns);
  uint32_t key = 0;
  find_digits(group, Row<float>{columns, kColumns}, One{}, 0, 3, &key, &need);
  return key;
}
template <class T>
uint32_t lowest_key(SerialGroup&, const Row<T>&, const TokenMass<Row<T>>& weight, uint64_t) {
  return weight.threshold > -kInfinity ? key_of(weight.threshold) : 0;
}

template <class T, class Weight>
POLYSPEC_LOOP float select_typed(SerialGroup& group, const Row<T>& row, const Weight& weight,
                                 uint64_t need) {
  Candidates found;
  uint32_t key = 0;
  int from = 0;
  const uint32_t low = lowest_key(group, row, weight, need);
  bool narrow = low > 0 && collect(row, low, ~uint32_t{0} - low, &found);
  if (!narrow) {
    find_digits(group, row, weight, 0, 1, &key, &need);
    from = 1;
    narrow = collect(row, key, (1u << 21) - 1, &found);
  }
  if (narrow) {
    const Row<float> few{found.logits, found.count};
    find_digits(group, few, weight_over(weight, few), from, 3, &key, &need);
  } else {
    find_digits(group, row, weight, from, 3, &key, &need);
  }
  return value_of_key(key);
}

template <class RowType>
float select_from_top(SerialGroup& group, const RowType& any, One, uint64_t need) {
  return with_type(any, [&](const auto& row) { return select_typed(group, row, One{}, need); });
}
template <class RowType>
float select_from_top(SerialGroup& group, const RowType& any, const TokenMass<RowType>& weight,
                      uint64_t need) {
  return with_type(
      any, [&](const auto& row) { return select_typed(group, row, over(weight, row), need); });
}

}  // namespace polyspec::POLYSPEC_CORE
