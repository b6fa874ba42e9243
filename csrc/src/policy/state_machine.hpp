// The state machines of one row (PolicyKind::kFsm): a window per level that moves on how its blocks
// fare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "polyspec/policy.hpp"

namespace polyspec {
namespace policy {

class StateMachines {
 public:
  StateMachines() = default;
  explicit StateMachines(const PolicyOptions& options) : windows_(options.windows) {
    for (int64_t& window : windows_) window = std::max<int64_t>(window, 1);
  }

  void move(const PolicyOptions& options, const RoundReport& report) {
    for (int64_t i = 0; i < report.num_steps; ++i) {
      const StepReport& step = report.steps[i];
      const size_t at = static_cast<size_t>(step.level - 1);
      if (at >= windows_.size() || step.tokens == 0) continue;
      // A window above grows or shrinks by a block from below, or nothing would change.
      const int64_t block = at + 1 < windows_.size() ? windows_[at + 1] + 1 : 1;
      if (step.accepted == step.tokens) {
        windows_[at] += block;
      } else if (2 * step.accepted < step.tokens) {
        windows_[at] -= block;
      }
      windows_[at] = std::clamp<int64_t>(windows_[at], 1, options.max_windows[at]);
    }
  }

  const std::vector<int64_t>& windows() const { return windows_; }

 private:
  std::vector<int64_t> windows_;
};

}  // namespace policy
}  // namespace polyspec
