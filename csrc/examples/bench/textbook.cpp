#include "textbook.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace textbook {
namespace {

// Logit below which the filters drop a token.
float threshold(const float* logits, int64_t vocab, const polyspec::SamplingParams& sampling) {
  const size_t v = static_cast<size_t>(vocab);
  std::vector<float> sorted(logits, logits + v);
  std::sort(sorted.begin(), sorted.end(), std::greater<float>());
  const int64_t top_k = sampling.top_k.value;
  size_t kept = top_k > 0 && top_k < vocab ? static_cast<size_t>(top_k) : v;
  if (sampling.top_p.value < 1.0f) {
    double total = 0.0;
    for (size_t i = 0; i < kept; ++i) total += std::exp(static_cast<double>(sorted[i] - sorted[0]));
    double passed = 0.0;
    for (size_t i = 0; i < kept; ++i) {
      passed += std::exp(static_cast<double>(sorted[i] - sorted[0]));
      if (passed >= static_cast<double>(sampling.top_p.value) * total) kept = i + 1;
    }
  }
  const float least = sampling.min_p.value > 0.0f ? sorted[0] + std::log(sampling.min_p.value)
                                                  : -std::numeric_limits<float>::infinity();
  return std::max(sorted[kept - 1], least);
}

int64_t draw(const std::vector<double>& weights, std::mt19937_64& engine) {
  double total = 0.0;
  for (const double weight : weights) total += weight;
  double left = total * std::uniform_real_distribution<double>()(engine);
  int64_t last = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0.0) continue;
    last = static_cast<int64_t>(i);
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return last;
}

const float* row(const std::vector<float>& logits, int64_t index, int64_t vocab) {
  return logits.data() + index * vocab;
}

}  // namespace

std::vector<double> statistics(const float* logits, int64_t vocab,
                               const polyspec::SamplingParams& sampling) {
  const bool filtered =
      sampling.top_k.value > 0 || sampling.top_p.value < 1.0f || sampling.min_p.value > 0.0f;
  const float least =
      filtered ? threshold(logits, vocab, sampling) : -std::numeric_limits<float>::infinity();
  const float max = *std::max_element(logits, logits + vocab);
  std::vector<double> probs(static_cast<size_t>(vocab));
  double total = 0.0;
  for (size_t i = 0; i < probs.size(); ++i) {
    probs[i] = logits[i] >= least ? static_cast<double>(std::exp(logits[i] - max)) : 0.0;
    total += probs[i];
  }
  for (double& p : probs) p /= total;
  return probs;
}

int64_t sample(const Inputs& inputs, int64_t request, std::mt19937_64& engine) {
  const Shape& shape = inputs.shape;
  const float* logits = row(inputs.target, request * (shape.draft_len + 1), shape.vocab);
  return draw(statistics(logits, shape.vocab, shape.sampling), engine);
}

int64_t verify(const Inputs& inputs, int64_t request, std::mt19937_64& engine, int64_t* emitted) {
  const Shape& shape = inputs.shape;
  const int64_t k = shape.draft_len;
  std::uniform_real_distribution<double> uniform;
  for (int64_t i = 0;; ++i) {
    std::vector<double> p = statistics(row(inputs.target, request * (k + 1) + i, shape.vocab),
                                       shape.vocab, shape.sampling);
    if (i < k) {
      const std::vector<double> q =
          statistics(row(inputs.draft, request * k + i, shape.vocab), shape.vocab, shape.sampling);
      const size_t y = static_cast<size_t>(inputs.tokens[static_cast<size_t>(request * k + i)]);
      if (uniform(engine) * q[y] < p[y]) continue;
      for (size_t x = 0; x < p.size(); ++x) p[x] = std::max(p[x] - q[x], 0.0);
    }
    *emitted = draw(p, engine);
    return i;
  }
}

}  // namespace textbook
