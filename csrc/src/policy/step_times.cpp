#include "policy/step_times.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace polyspec {
namespace policy {
namespace {

constexpr double kFades = 400;   // steps after which a time counts half
constexpr double kAlone = 1.5;   // of as many passes of one token, the most that a pass may take
constexpr double kAlike = 0.41;  // log(1.5), and a little for rounding
constexpr double kLead = 2;      // times of a width that weigh as much as the line

// Of the first `count` values or all of them; the lower one of two.
template <size_t N>
double median(std::array<double, N> values, int32_t count) {
  const size_t n = std::min(static_cast<size_t>(count), N);
  for (size_t i = 1; i < n; ++i) {
    for (size_t j = i; j > 0 && values[j - 1] > values[j]; --j) std::swap(values[j - 1], values[j]);
  }
  return values[(n - 1) / 2];
}

}  // namespace

int64_t WidthTimes::index(int64_t width) { return std::clamp<int64_t>(width, 0, kWidths); }

double WidthTimes::weight(const Cell& cell) const {
  const double times = std::min<double>(cell.count, static_cast<double>(cell.latest.size()));
  return times * std::exp2(-static_cast<double>(steps_ - cell.seen) / kFades);
}

void WidthTimes::observe(int64_t width, double seconds) {
  Cell& cell = cells_[static_cast<size_t>(index(width))];
  cell.latest[static_cast<size_t>(cell.count) % cell.latest.size()] = seconds;
  // Only the ring's index and "as many as it holds" are read of the count.
  if (++cell.count == 1 << 30) cell.count = static_cast<int32_t>(cell.latest.size()) << 8;
  cell.seen = ++steps_;
  stale_ = true;
}

bool WidthTimes::fresh(int64_t width) const {
  return weight(cells_[static_cast<size_t>(index(width))]) > 0.5;
}

double WidthTimes::seconds(int64_t width) const {
  if (stale_) fit();
  return fitted_[static_cast<size_t>(index(width))];
}

double WidthTimes::measured(int64_t width) const {
  const Cell& cell = cells_[static_cast<size_t>(index(width))];
  return cell.count > 0 ? middle(static_cast<size_t>(index(width))) : seconds(width);
}

double WidthTimes::middle(size_t index) const {
  const auto of = [](const Cell& cell) { return median(cell.latest, cell.count); };
  const double found = of(cells_[index]);
  if (proportional_ || cells_[0].count == 0) return found;
  return std::min(found, kAlone * static_cast<double>(index + 1) * of(cells_[0]));
}

double WidthTimes::between(double width) const {
  const int64_t floor = static_cast<int64_t>(width);
  const double part = width - static_cast<double>(floor);
  return (1 - part) * seconds(floor) + part * seconds(floor + 1);
}

void WidthTimes::fit() const {
  stale_ = false;
  std::array<double, kWidths + 1> weights{};
  std::array<double, kWidths + 1> middles{};
  double w = 0, wx = 0, wy = 0;
  for (size_t i = 0; i < cells_.size(); ++i) {
    if (cells_[i].count == 0) continue;
    weights[i] = weight(cells_[i]);
    middles[i] = middle(i);
    w += weights[i];
    wx += weights[i] * static_cast<double>(i);
    wy += weights[i] * middles[i];
  }
  // A little weight far from the measured widths keeps the slope sane while widths lie close
  // together:
  // no tokens cost nothing where time is per token, more tokens cost no more where it is per pass.
  const double far = proportional_ ? 0 : wx / w + 16;
  const double there = proportional_ ? 0 : wy / w;
  constexpr double kFar = 0.02;
  const double x = (wx + kFar * far) / (w + kFar);
  const double y = (wy + kFar * there) / (w + kFar);
  double xx = kFar * (far - x) * (far - x);
  double xy = kFar * (far - x) * (there - y);
  for (size_t i = 0; i < cells_.size(); ++i) {
    const double apart = static_cast<double>(i) - x;
    xx += weights[i] * apart * apart;
    xy += weights[i] * apart * (middles[i] - y);
  }
  const double slope = std::max(0.0, xy / xx);
  for (size_t i = 0; i < cells_.size(); ++i) {
    const double line = std::max(0.0, y + slope * (static_cast<double>(i) - x));
    // All windows are compared with plain decoding, with times that need no other's.
    const double lead = i == 0 && weights[i] > 0.5 ? 0 : kLead;
    fitted_[i] = (weights[i] * middles[i] + lead * line) / (weights[i] + lead);
  }
}

void StepTimes::observe(int32_t level, int64_t batch, int64_t width, double seconds) {
  std::vector<Entry>& table = tables_[static_cast<size_t>(level - 1)];
  auto at = std::find_if(table.begin(), table.end(),
                         [batch](const Entry& entry) { return entry.batch == batch; });
  if (at == table.end()) {
    constexpr size_t kSizes = 16;
    if (table.size() == kSizes) table.erase(table.begin());
    at = table.insert(table.end(), Entry{batch, WidthTimes(level == levels_)});
  }
  at->times.observe(width, seconds);
}

double StepTimes::apart(const Entry& entry, int64_t batch) {
  return std::fabs(std::log(static_cast<double>(entry.batch) /
                            static_cast<double>(std::max<int64_t>(batch, 1))));
}

const StepTimes::Entry* StepTimes::nearest(int32_t level, int64_t batch) const {
  const std::vector<Entry>& table = tables_[static_cast<size_t>(level - 1)];
  const auto at = std::min_element(
      table.begin(), table.end(),
      [batch](const Entry& a, const Entry& b) { return apart(a, batch) < apart(b, batch); });
  return at == table.end() ? nullptr : &*at;
}

const WidthTimes& StepTimes::at(int32_t level, int64_t batch) const {
  const Entry* entry = nearest(level, batch);
  return entry == nullptr ? unknown_ : entry->times;
}

bool StepTimes::known(int32_t level, int64_t batch) const {
  const Entry* entry = nearest(level, batch);
  return entry != nullptr && apart(*entry, batch) < kAlike;
}

}  // namespace policy
}  // namespace polyspec
