#include "polyspec/renewal.hpp"

#include <stdexcept>
#include <string>

#include "policy/renewal_steps.hpp"

namespace polyspec {
namespace {

using policy::Lengths;

constexpr int64_t kLongest = 4096;

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

// `rounds` may be empty: they follow from the windows.
void check(const std::vector<double>& acceptance, const std::vector<int64_t>& windows,
           const std::vector<int64_t>& rounds) {
  if (windows.empty()) refuse("windows: expected at least 1, got 0");
  if (acceptance.size() != windows.size() || (!rounds.empty() && rounds.size() != windows.size())) {
    refuse("acceptance and rounds: expected " + std::to_string(windows.size()) +
           ", one for each window, got " + std::to_string(acceptance.size()) + " and " +
           std::to_string(rounds.size()));
  }
  for (const double a : acceptance) {
    if (!(a >= 0 && a <= 1)) refuse("acceptance: expected [0, 1], got " + std::to_string(a));
  }
  for (const int64_t w : windows) {
    if (w < 0 || w > kLongest) {
      refuse("windows: expected 0 to " + std::to_string(kLongest) + ", got " + std::to_string(w));
    }
  }
  for (const int64_t r : rounds) {
    if (r < 0) refuse("rounds: expected >= 0, got " + std::to_string(r));
  }
}

// Blocks come until they fill the window, or until there are `bound` of them (0: no bound).
// Writes the distribution of the tokens pending then; returns how many come on average.
double gather(const Lengths& block, int64_t window, int64_t bound, Lengths* pending) {
  pending->assign(static_cast<size_t>(window) + block.size() - 1, 0.0);
  Lengths waiting{1.0};
  Lengths next;
  double blocks = 0;
  double left = 1;
  for (int64_t round = 1; left > 1e-15; ++round) {
    blocks += left;
    policy::join(waiting, block, &next);
    const bool last = round == bound;
    waiting.assign(std::min(next.size(), static_cast<size_t>(window)), 0.0);
    left = 0;
    for (size_t m = 0; m < next.size(); ++m) {
      if (last || m >= static_cast<size_t>(window)) {
        (*pending)[m] += next[m];
      } else {
        waiting[m] = next[m];
        left += next[m];
      }
    }
  }
  return blocks;
}

}  // namespace

RenewalRound renewal_round(const std::vector<double>& acceptance,
                           const std::vector<int64_t>& windows, std::vector<int64_t> rounds) {
  check(acceptance, windows, rounds);
  const size_t count = windows.size();
  if (rounds.empty()) {
    rounds.assign(count, 0);
    for (size_t i = 0; i + 1 < count; ++i) {
      rounds[i] = policy::default_bound(windows[i], windows[i + 1]);
    }
  }
  RenewalRound out;
  out.passes.assign(count + 1, 0.0);
  out.verified.assign(count, 0.0);
  std::vector<double> blocks(count, 0.0);  // of the level below, per pass
  Lengths block;
  for (size_t i = count; i-- > 0;) {
    const int64_t window = windows[i];
    Lengths pending = policy::exactly(window);
    blocks[i] = window > 0 ? 1 : 0;
    if (i + 1 < count && window > 0) blocks[i] = gather(block, window, rounds[i], &pending);
    out.verified[i] = policy::mean(pending);
    double reach = 1;
    size_t reached = 0;
    const auto survives = [&](size_t j) {
      for (; reached < j; ++reached) reach *= acceptance[i];
      return reach;
    };
    policy::emitted(pending, survives, &block);
  }
  out.tokens = policy::mean(block);
  out.passes[0] = 1;
  for (size_t i = 0; i < count; ++i) out.passes[i + 1] = out.passes[i] * blocks[i];
  return out;
}

}  // namespace polyspec
