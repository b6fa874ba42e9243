// The distributions and rules of the papers in plain double arithmetic, written for clarity and
// from the formulas alone. They predict the decisions of the production code: as a check of each
// verification, and as a first guess for the bisection of outcomes.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "polyspec/verify.hpp"

namespace enumeration {

using Distribution = std::vector<double>;  // [vocab], sums to 1

inline Distribution normalised(Distribution weights) {
  double total = 0.0;
  for (double w : weights) total += w;
  for (double& w : weights) w = total > 0.0 ? w / total : 0.0;
  return weights;
}

// softmax(logits / T), then top-k, top-p and min-p, each on the tokens that the last kept; ties at
// the edge stay.
inline Distribution processed_distribution(const float* logits, int64_t vocab,
                                           const polyspec::SamplingParams& sampling) {
  const double temperature = sampling.temperature.value;
  const float* best = std::max_element(logits, logits + vocab);
  Distribution distribution(vocab, 0.0);
  if (temperature == 0.0) {
    distribution[best - logits] = 1.0;  // max_element gives the first of equals
    return distribution;
  }
  for (int64_t x = 0; x < vocab; ++x) {
    distribution[x] =
        std::exp((static_cast<double>(logits[x]) - static_cast<double>(*best)) / temperature);
  }
  distribution = normalised(distribution);
  const auto keep_at_least = [&distribution](double edge) {
    for (double& p : distribution) p = p >= edge ? p : 0.0;
    distribution = normalised(distribution);
  };
  const auto descending = [&distribution] {
    Distribution sorted = distribution;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    return sorted;
  };
  const int64_t k = sampling.top_k.value;
  if (k > 0 && k < vocab) keep_at_least(descending()[k - 1]);
  if (sampling.top_p.value < 1.0f) {
    double sum = 0.0, edge = 0.0;
    for (double p : descending()) {
      if (sum >= sampling.top_p.value && edge > 0.0) break;
      sum += p;
      edge = p;
    }
    keep_at_least(edge);
  }
  if (sampling.min_p.value > 0.0f) {
    keep_at_least(sampling.min_p.value *
                  *std::max_element(distribution.begin(), distribution.end()));
  }
  return distribution;
}

// The decisions of a verification: accept[i] is the probability that test i succeeds (token rule:
// token i is accepted if reached; block rule: h_{i+1}), emit[j] the distribution of the last token
// when j tokens are accepted.
struct Decisions {
  std::vector<double> accept;      // [k]
  std::vector<Distribution> emit;  // [k+1]
};

// p: [k+1] target distributions, q: [k] draft distributions, y: [k] draft tokens.
inline Decisions reference_decisions(polyspec::Rule rule, const std::vector<Distribution>& p,
                                     const std::vector<Distribution>& q,
                                     const std::vector<int64_t>& y) {
  const size_t k = y.size();
  Decisions d;
  double kept = 1.0;  // the block rule's p_i; 1 throughout for the token rule
  for (size_t i = 0; i < k; ++i) {
    Distribution residual(p[i].size());
    double s = 0.0;
    for (size_t x = 0; x < residual.size(); ++x) {
      residual[x] = std::max(kept * p[i][x] - q[i][x], 0.0);
      s += residual[x];
    }
    d.emit.push_back(normalised(residual));
    const double ratio = p[i][y[i]] / q[i][y[i]];
    if (rule == polyspec::Rule::kToken) {
      d.accept.push_back(std::min(1.0, ratio));
      continue;
    }
    if (i > 0) d.accept.push_back(s > 0.0 ? s / (s + 1.0 - kept) : 0.0);
    kept = std::min(1.0, kept * ratio);
  }
  if (rule == polyspec::Rule::kBlock && k > 0) d.accept.push_back(kept);
  d.emit.push_back(p[k]);
  return d;
}

}  // namespace enumeration
