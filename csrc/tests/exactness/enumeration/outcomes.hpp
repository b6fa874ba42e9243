// The exact distribution of the outcomes of polyspec::sample and polyspec::verify, as functions of
// their 64-bit draws.
//
// Each draw is compared with one threshold: an acceptance test succeeds for all bits below an edge,
// and the emitted token, drawn by inverse CDF, never decreases with its bits. So the probability of
// each branch is (last bits - first bits) / 2^64, and its edges are found by bisection with the
// other draws fixed at values that lead into the branch: 0 passes every test that can pass, ~0
// fails every test that can fail.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "polyspec/verify.hpp"
#include "reference.hpp"
#include "support/check.hpp"

namespace enumeration {

struct Outcome {
  std::vector<int64_t> tokens;  // as emitted: accepted prefix, then correction or bonus
  std::vector<polyspec::RowStatistics> statistics;  // of each emitted token
  int64_t accepted = 0;
  double probability = 0.0;
};

constexpr double kTwo64 = 18446744073709551616.0;

// A set of bits [0, first) that is never everything: `all` says that no bits fail.
struct Edge {
  uint64_t first = 0;  // the first bits that fail
  bool all = false;
  double fraction() const { return all ? 1.0 : static_cast<double>(first) / kTwo64; }
};

// The edge of a test that succeeds up to some bits and fails from there on. A good guess of its
// fraction saves most of the calls and cannot change the answer.
template <class Test>
Edge find_edge(Test&& succeeds, double guess) {
  if (!succeeds(0)) return {0, false};
  if (succeeds(~uint64_t{0})) return {0, true};
  uint64_t low = 0, high = ~uint64_t{0};  // succeeds(low), not succeeds(high)
  if (guess > 0.0 && guess < 1.0) {
    const uint64_t middle = static_cast<uint64_t>(guess * kTwo64);
    for (uint64_t reach = uint64_t{1} << 12; reach < uint64_t{1} << 50; reach <<= 5) {
      const uint64_t left = middle > reach ? middle - reach : 0;
      const uint64_t right = middle < ~reach ? middle + reach : ~uint64_t{0};
      if (left > low && left < high) (succeeds(left) ? low : high) = left;
      if (right > low && right < high) (succeeds(right) ? low : high) = right;
      if (high - low <= 2 * reach) break;
    }
  }
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (succeeds(middle) ? low : high) = middle;
  }
  return {high, false};
}

// The distribution of an emitted token that never decreases with its bits, and for each token the
// first bits that give it. `token_at(bits)` runs the production code.
template <class TokenAt>
Distribution find_distribution(TokenAt&& token_at, const Distribution& guess,
                               std::vector<uint64_t>* first_bits) {
  const int64_t vocab = static_cast<int64_t>(guess.size());
  Distribution distribution(vocab, 0.0);
  first_bits->assign(vocab, 0);
  uint64_t start = 0;
  double below = 0.0;  // guessed probability of the tokens up to and including the current one
  int64_t counted = 0;
  for (;;) {
    const int64_t token = token_at(start);
    CHECK(token >= counted && token < vocab);
    while (counted <= token) below += guess[counted++];
    (*first_bits)[token] = start;
    const Edge edge = find_edge([&](uint64_t bits) { return token_at(bits) <= token; }, below);
    if (edge.all) {
      distribution[token] = (kTwo64 - static_cast<double>(start)) / kTwo64;
      return distribution;
    }
    CHECK(edge.first > start);
    distribution[token] = static_cast<double>(edge.first - start) / kTwo64;
    start = edge.first;
  }
}

inline Distribution find_sample_distribution(polyspec::SampleParams params,
                                             polyspec::RowStatistics* row_statistics) {
  uint64_t bits = 0;
  int64_t token = -1;
  float logprob = 0.0f;
  int32_t status = 0;
  params.batch = 1;
  params.draw.bits = &bits;
  params.tokens = &token;
  params.logprobs = &logprob;
  params.status = &status;
  params.statistics = row_statistics;
  const auto token_at = [&](uint64_t value) {
    bits = value;
    CHECK(polyspec::sample(params).ok());
    CHECK_EQ(0, status);
    return token;
  };
  std::vector<uint64_t> first_bits;
  const Distribution guess = processed_distribution(static_cast<const float*>(params.logits),
                                                    params.vocab, params.sampling);
  return find_distribution(token_at, guess, &first_bits);
}

// Runs polyspec::verify for one request with chosen bits.
class Verification {
 public:
  explicit Verification(const polyspec::VerifyParams& params)
      : k_(params.draft_len),
        bits_(k_ + 1, 0),
        tokens_(k_ + 1),
        logprobs_(k_ + 1),
        statistics_(k_ + 1),
        params_(params) {
    params_.batch = 1;
    params_.draw.bits = bits_.data();
    params_.tokens = tokens_.data();
    params_.num_accepted = &accepted_;
    params_.logprobs = logprobs_.data();
    params_.status = &status_;
    params_.statistics = statistics_.data();
  }

  std::vector<uint64_t>& bits() {
    return bits_;
  }  // [k+1]: k acceptance tests, then the emitted token

  // Number of accepted tokens with the present bits.
  int64_t run() {
    CHECK(polyspec::verify(params_).ok());
    CHECK_EQ(0, status_ & (polyspec::kStatusNotes - 1));
    CHECK(accepted_ >= 0 && accepted_ <= k_);
    for (int64_t i = 0; i <= k_; ++i) {
      CHECK_EQ(i > accepted_, tokens_[i] == -1);
      if (i < accepted_) CHECK_EQ(params_.draft_tokens[i], tokens_[i]);
    }
    return accepted_;
  }
  int64_t last_token() const { return tokens_[accepted_]; }
  int32_t status() const { return status_; }
  Outcome outcome(double probability) const {
    return {{tokens_.begin(), tokens_.begin() + accepted_ + 1},
            {statistics_.begin(), statistics_.begin() + accepted_ + 1},
            accepted_,
            probability};
  }

 private:
  int64_t k_, accepted_ = 0;
  int32_t status_ = 0;
  std::vector<uint64_t> bits_;
  std::vector<int64_t> tokens_;
  std::vector<float> logprobs_;
  std::vector<polyspec::RowStatistics> statistics_;
  polyspec::VerifyParams params_;
};

// All outcomes of a verification. `guess` is the papers' prediction for it.
inline std::vector<Outcome> find_outcomes(const polyspec::VerifyParams& params,
                                          const Decisions& guess) {
  Verification verification(params);
  const int64_t k = params.draft_len;
  std::vector<uint64_t>& bits = verification.bits();
  std::vector<Outcome> outcomes;
  // The last token after `accepted` accepted tokens; bits[0 ... k-1] lead there.
  const auto add_emissions = [&](int64_t accepted, double reached) {
    const auto token_at = [&](uint64_t value) {
      bits[k] = value;
      CHECK_EQ(accepted, verification.run());
      // A residual may round to zero only on a branch that only rounding makes possible.
      if (verification.status() != 0) CHECK_BELOW(1e-14, reached);
      return verification.last_token();
    };
    std::vector<uint64_t> first_bits;
    const Distribution distribution =
        find_distribution(token_at, guess.emit[accepted], &first_bits);
    for (size_t x = 0; x < distribution.size(); ++x) {
      if (distribution[x] == 0.0) continue;
      token_at(first_bits[x]);
      outcomes.push_back(verification.outcome(reached * distribution[x]));
    }
  };
  const auto acceptance = [&](int64_t test) {
    const uint64_t held = bits[test];
    bits[k] = 0;
    const Edge edge = find_edge(
        [&](uint64_t value) {
          bits[test] = value;
          return verification.run() > test;
        },
        guess.accept[test]);
    bits[test] = held;
    return edge.fraction();
  };

  double reached = 1.0;
  bits.assign(k + 1, ~uint64_t{0});
  if (params.rule == polyspec::Rule::kToken) {
    for (int64_t i = 0; i < k && reached > 0.0; ++i) {  // tests 0 ... i-1 pass, i is tried
      const double a = acceptance(i);
      if (a < 1.0) add_emissions(i, reached * (1.0 - a));
      reached *= a;
      bits[i] = 0;
    }
    if (reached > 0.0) add_emissions(k, reached);
  } else {
    for (int64_t i = k; i > 0 && reached > 0.0;
         --i) {  // the tests of all longer prefixes fail, i is tried
      const double h = acceptance(i - 1);
      if (h > 0.0) {
        bits[i - 1] = 0;
        add_emissions(i, reached * h);
        bits[i - 1] = ~uint64_t{0};
      }
      reached *= 1.0 - h;
    }
    if (reached > 0.0) add_emissions(0, reached);
  }
  return outcomes;
}

// Largest difference between the outcomes' probabilities and the papers' formulas for the same
// distributions.
inline double deviation(polyspec::Rule rule, const std::vector<Outcome>& outcomes,
                        const Decisions& formula) {
  const size_t k = formula.accept.size();
  std::vector<double> stands(k + 1, 0.0);
  double reached = 1.0;
  for (size_t step = 0; step < k; ++step) {
    const size_t i = rule == polyspec::Rule::kToken ? step : k - 1 - step;
    const double a = formula.accept[i];
    stands[rule == polyspec::Rule::kToken ? i : i + 1] =
        reached * (rule == polyspec::Rule::kToken ? 1.0 - a : a);
    reached *= rule == polyspec::Rule::kToken ? a : 1.0 - a;
  }
  stands[rule == polyspec::Rule::kToken ? k : 0] = reached;
  std::vector<Distribution> left(k + 1);
  for (size_t j = 0; j <= k; ++j) {
    for (double p : formula.emit[j]) left[j].push_back(stands[j] * p);
  }
  for (const Outcome& o : outcomes) left[o.accepted][o.tokens.back()] -= o.probability;
  double worst = 0.0;
  for (const Distribution& distribution : left) {
    for (double difference : distribution) worst = std::max(worst, std::fabs(difference));
  }
  return worst;
}

}  // namespace enumeration
