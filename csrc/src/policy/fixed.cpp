#include <algorithm>
#include <utility>

#include "policy/adaptive.hpp"

namespace polyspec {
namespace policy {
namespace {

class Fixed final : public AdaptivePolicy {
 public:
  explicit Fixed(PolicyOptions options) : AdaptivePolicy(std::move(options)) {}

 private:
  void begin(int64_t, const RoundReport&) override {}
  void learn(int64_t, const RoundReport&) override {}
  void choose(const Choice&, int64_t* windows) override {
    std::copy(options().windows.begin(), options().windows.end(), windows);
  }
  void forget() override {}
};

}  // namespace

std::unique_ptr<WindowPolicy> make_fixed(PolicyOptions options) {
  return std::make_unique<Fixed>(std::move(options));
}

}  // namespace policy
}  // namespace polyspec
