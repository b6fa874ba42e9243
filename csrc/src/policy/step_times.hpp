// Seconds of a level's step as a function of its width, from the latest steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace polyspec {
namespace policy {

// Of one level and one batch size. Each width keeps its last five times and counts with their
// median, which one slow step (a compilation, a capture, another program) does not move; a line
// through the measured widths fills the others, and is preferred for widths measured seldom or long
// ago. A pass of so many tokens takes hardly longer than that many passes: a longer time is a slow
// step.
class WidthTimes {
 public:
  static constexpr int64_t kWidths = 64;  // wider steps count as the widest

  // proportional: a single width gives a time per token for the others (drafting), not a constant
  // (one forward pass).
  explicit WidthTimes(bool proportional) : proportional_(proportional) {}

  void observe(int64_t width, double seconds);
  double seconds(int64_t width) const;  // 0: nothing is known
  // Of that width's times; without any, the estimate of the other widths.
  double measured(int64_t width) const;
  double between(double width) const;  // of a mean width, >= 0
  // Whether the width was seen, and not too long ago.
  bool fresh(int64_t width) const;

 private:
  struct Cell {
    std::array<double, 5> latest{};
    int32_t count = 0;  // times ever seen
    int64_t seen = 0;   // step of the last of them
  };
  static int64_t index(int64_t width);
  double weight(const Cell& cell) const;
  double middle(size_t index) const;  // of a width that was seen
  void fit() const;

  bool proportional_;
  int64_t steps_ = 0;
  std::array<Cell, kWidths + 1> cells_{};
  mutable bool stale_ = false;
  mutable std::array<double, kWidths + 1> fitted_{};
};

// Of all levels and batch sizes. A batch size that was not seen has the times of the nearest.
class StepTimes {
 public:
  explicit StepTimes(int32_t levels) : levels_(levels), tables_(static_cast<size_t>(levels)) {}

  void observe(int32_t level, int64_t batch, int64_t width, double seconds);
  // Looked up once per choice; never null. Valid until the next `observe`.
  const WidthTimes& at(int32_t level, int64_t batch) const;
  // Whether the batch size, or one that is half as large again or two thirds of it, was seen.
  bool known(int32_t level, int64_t batch) const;

 private:
  struct Entry {
    int64_t batch;
    WidthTimes times;
  };
  int32_t levels_;
  const Entry* nearest(int32_t level, int64_t batch) const;  // null: none was seen
  static double apart(const Entry& entry, int64_t batch);    // logarithm of the ratio
  std::vector<std::vector<Entry>> tables_;
  WidthTimes unknown_{false};
};

}  // namespace policy
}  // namespace polyspec
