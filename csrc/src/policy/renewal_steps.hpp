// The two steps of the renewal model (polyspec/renewal.hpp) on probabilities of lengths.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace polyspec {
namespace policy {

// [m]: the probability of length m.
using Lengths = std::vector<double>;

// `length` for certain, >= 0.
inline Lengths exactly(int64_t length) {
  const size_t at = static_cast<size_t>(length);
  Lengths out(at + 1, 0.0);
  out[at] = 1;
  return out;
}

// Tokens that a verification emits, with the number of pending tokens distributed as `pending`.
// survival(j): the probability that the first j tokens of a block are accepted; survival(0) is 1.
template <class Survival>
void emitted(const Lengths& pending, const Survival& survival, Lengths* out) {
  out->assign(pending.size() + 1, 0.0);
  double more = 1;  // the probability of j tokens or more
  double here = 1;
  for (size_t j = 0; j < pending.size(); ++j) {
    // j accepted and then rejected, or j pending and all accepted.
    const double next = survival(j + 1);
    const double longer = std::max(0.0, more - pending[j]);
    (*out)[j + 1] = longer * (here - next) + pending[j] * here;
    more = longer;
    here = next;
  }
}

inline double mean(const Lengths& lengths) {
  double sum = 0;
  for (size_t m = 0; m < lengths.size(); ++m) sum += static_cast<double>(m) * lengths[m];
  return sum;
}

// Of the longest of so many independent lengths.
inline double mean_of_most(const Lengths& lengths, int64_t count) {
  if (count <= 1) return mean(lengths);
  double sum = 0, before = 0, below = 0;
  for (size_t m = 0; m < lengths.size(); ++m) {
    below += lengths[m];
    const double all = std::pow(std::min(below, 1.0), static_cast<double>(count));
    sum += static_cast<double>(m) * (all - before);
    before = all;
  }
  return sum;
}

// The mean of `emitted`, without its distribution.
template <class Survival>
double emitted_mean(const Lengths& pending, const Survival& survival) {
  double sum = 0;
  double more = 1;
  for (size_t j = 0; j < pending.size(); ++j) {
    sum += more * survival(j);
    more -= pending[j];
  }
  return sum;
}

// The length of a block of each and one more block.
inline void join(const Lengths& a, const Lengths& b, Lengths* out) {
  out->assign(a.size() + b.size() - 1, 0.0);
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == 0) continue;
    for (size_t j = 0; j < b.size(); ++j) (*out)[i + j] += a[i] * b[j];
  }
}

// As many blocks from below as fill a window if all of each is accepted.
inline int64_t default_bound(int64_t window, int64_t below) {
  return std::max<int64_t>(1, (window + below) / (below + 1));
}

}  // namespace policy
}  // namespace polyspec
