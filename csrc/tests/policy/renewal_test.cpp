// The renewal model: closed forms, and a simulation of the machine that the scheduler is.
#include "polyspec/renewal.hpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "polyspec/scheduler.hpp"
#include "support/check.hpp"

namespace {

using polyspec::renewal_round;
using polyspec::RenewalRound;

// Two levels: (1 - a^{m+1}) / (1 - a), Leviathan et al. 2023.
void test_two_levels() {
  for (const double a : {0.0, 0.3, 0.9}) {
    for (const int64_t m : {0, 1, 4, 16}) {
      const RenewalRound round = renewal_round({a}, {m});
      CHECK_NEAR((1 - std::pow(a, static_cast<double>(m + 1))) / (1 - a), round.tokens, 1e-12);
      CHECK_EQ(m > 0 ? 1.0 : 0.0, round.passes[1]);
      CHECK_EQ(static_cast<double>(m), round.verified[0]);
    }
  }
  CHECK_NEAR(6.0, renewal_round({1.0}, {5}).tokens, 1e-12);
}

// Three levels with a bound on rounds: (1 - a phi(a)^R) / (1 - a), Chen et al. 2023, with
// phi(x) = 1 + (x - 1) (1 - a'^{k+1} x^{k+1}) / (1 - a' x).
void test_cascade() {
  for (const double a : {0.5, 0.9}) {
    for (const double inner : {0.2, 0.8}) {
      for (const int64_t k : {1, 3}) {
        for (const int64_t r : {1, 2, 5}) {
          const double x = a;
          const double power = std::pow(inner * x, static_cast<double>(k + 1));
          const double phi = 1 + (x - 1) * (1 - power) / (1 - inner * x);
          const double tokens = (1 - a * std::pow(phi, static_cast<double>(r))) / (1 - a);
          const RenewalRound round = renewal_round({a, inner}, {r * (k + 1), k});
          CHECK_NEAR(tokens, round.tokens, 1e-12);
          CHECK_NEAR(static_cast<double>(r), round.passes[1], 1e-12);
          CHECK_NEAR(static_cast<double>(r), round.passes[2], 1e-12);
        }
      }
    }
  }
}

// Tokens and passes per round of the target, from a Scheduler with levels that accept by chance.
RenewalRound simulated(const std::vector<double>& acceptance, const std::vector<int64_t>& windows,
                       const std::vector<int64_t>& rounds, int64_t targets) {
  polyspec::Scheduler scheduler(windows, rounds);
  std::mt19937_64 chance(7);
  std::uniform_real_distribution<double> uniform;
  RenewalRound out;
  out.passes.assign(windows.size() + 1, 0.0);
  out.verified.assign(windows.size(), 0.0);
  scheduler.start(int64_t{1} << 40);
  while (out.passes[0] < static_cast<double>(targets)) {
    const polyspec::Step step = scheduler.next();
    const size_t i = static_cast<size_t>(step.level - 1);
    out.passes[i] += 1;
    int64_t count = 0;
    if (step.kind == polyspec::Step::Kind::kDraft) {
      count = step.count;
    } else {
      while (count < step.count && uniform(chance) < acceptance[i]) ++count;
      ++count;
      out.verified[i] += static_cast<double>(step.count);
    }
    scheduler.report(step.level, count);
    if (step.level == 1) out.tokens += static_cast<double>(count);
  }
  for (size_t i = 0; i < out.verified.size(); ++i) out.verified[i] /= out.passes[i];
  for (double& passes : out.passes) passes /= static_cast<double>(targets);
  out.tokens /= static_cast<double>(targets);
  return out;
}

void test_against_the_scheduler() {
  struct Case {
    std::vector<double> acceptance;
    std::vector<int64_t> windows, rounds;
  };
  const Case cases[] = {
      {{0.8}, {5}, {0}},
      {{0.9, 0.6}, {5, 3}, {3, 0}},
      {{0.9, 0.6}, {6, 2}, {0, 0}},  // not bounded
      {{0.7, 0.5}, {4, 0}, {4, 0}},  // the middle level alone
      {{0.9, 0.8, 0.6}, {9, 4, 2}, {2, 2, 0}},
      {{0.9, 0.8, 0.6}, {9, 4, 2}, {0, 0, 0}},
  };
  for (const Case& one : cases) {
    const RenewalRound want = simulated(one.acceptance, one.windows, one.rounds, 200000);
    const RenewalRound got = renewal_round(one.acceptance, one.windows, one.rounds);
    CHECK_NEAR(want.tokens, got.tokens, 0.01 * want.tokens);
    for (size_t i = 0; i < want.passes.size(); ++i) {
      CHECK_NEAR(want.passes[i], got.passes[i], 0.01 * want.passes[i]);
    }
    for (size_t i = 0; i < want.verified.size(); ++i) {
      // passes of a level that had a part
      if (want.passes[i] > 0)
        CHECK_NEAR(want.verified[i], got.verified[i], 0.01 * want.verified[i]);
    }
  }
}

void test_bounds() {
  const std::vector<double> a{0.9, 0.6};
  const RenewalRound plain = renewal_round(a, {0, 3});
  CHECK_EQ(1.0, plain.tokens);
  CHECK_EQ(0.0, plain.passes[1]);
  CHECK_EQ(0.0, plain.passes[2]);
  CHECK_THROWS(std::invalid_argument, renewal_round({}, {}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5}, {1, 2}));
  CHECK_THROWS(std::invalid_argument, renewal_round({1.5}, {1}));
  CHECK_THROWS(std::invalid_argument, renewal_round({std::nan("")}, {1}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5}, {-1}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5, 0.5}, {3, -1}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5, 0.5}, {INT64_MAX, INT64_MAX}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5}, {int64_t{1} << 40}));
  CHECK_THROWS(std::invalid_argument, renewal_round({0.5}, {1}, {-1}));
}

}  // namespace

int main() {
  test_two_levels();
  test_cascade();
  test_against_the_scheduler();
  test_bounds();
  std::puts("renewal_test: all passed");
  return 0;
}
