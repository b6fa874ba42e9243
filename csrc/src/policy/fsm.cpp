#include <algorithm>
#include <utility>
#include <vector>

#include "policy/adaptive.hpp"
#include "policy/state_machine.hpp"

namespace polyspec {
namespace policy {
namespace {

class Fsm final : public AdaptivePolicy {
 public:
  explicit Fsm(PolicyOptions options)
      : AdaptivePolicy(std::move(options)), latest_(this->options()) {}

 private:
  void begin(int64_t row, const RoundReport&) override { at_row(rows_, row) = latest_; }
  void learn(int64_t row, const RoundReport& report) override {
    at_row(rows_, row).move(options(), report);
    latest_ = at_row(rows_, row);
  }
  void choose(const Choice& choice, int64_t* windows) override {
    const std::vector<int64_t>& own = at_row(rows_, choice.rows.front()).windows();
    std::copy(own.begin(), own.end(), windows);
  }
  void forget() override {
    rows_.clear();
    latest_ = StateMachines(options());
  }

  std::vector<StateMachines> rows_;
  StateMachines latest_;
};

}  // namespace

std::unique_ptr<WindowPolicy> make_fsm(PolicyOptions options) {
  return std::make_unique<Fsm>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
