#include "compare.hpp"

#include <cmath>
#include <map>
#include <utility>

double cross_entropy(Level& target, const std::vector<int64_t>& prompt,
                     const std::vector<int64_t>& text) {
  std::vector<int64_t> tokens = prompt;
  tokens.insert(tokens.end(), text.begin(), text.end());
  std::vector<float> logits(static_cast<size_t>(target.vocab_size()));
  double sum = 0;
  for (size_t i = prompt.size(); i < tokens.size(); ++i) {
    target.forward(tokens, static_cast<int64_t>(i), 1, logits.data());
    sum -= logits[static_cast<size_t>(tokens[i])];
  }
  return text.empty() ? 0.0 : sum / static_cast<double>(text.size());
}

namespace {

struct Counts {
  double chain = 0;
  double plain = 0;
};

// Tokens from the middle of the text: in mid-block, and behind both accepted and corrected ones.
std::pair<int64_t, int64_t> cell(const std::vector<int64_t>& text) {
  return {text.size() < 3 ? -1 : text[2], text.size() < 4 ? -1 : text[3]};
}

}  // namespace

Comparison compare_distributions(Chain& chain, Level& target, const std::vector<int64_t>& prompt,
                                 Settings settings, int64_t trials) {
  settings.max_new_tokens = 6;  // longer than what is counted, so that blocks are verified and cut
  std::map<std::pair<int64_t, int64_t>, Counts> cells;
  for (int64_t i = 0; i < trials; ++i, ++settings.seed) {
    ++cells[cell(chain.generate(prompt, settings))].chain;
    ++cells[cell(generate_plainly(target, prompt, settings))].plain;
  }

  Comparison out;
  Counts rare;
  const auto add = [&out](const Counts& c) {
    const double difference = c.chain - c.plain;
    out.chi_square += difference * difference / (c.chain + c.plain);
    ++out.cells;
  };
  for (const auto& entry : cells) {
    const Counts& c = entry.second;
    if (c.chain + c.plain >= 20) {
      add(c);
    } else {
      rare.chain += c.chain;
      rare.plain += c.plain;
    }
  }
  if (rare.chain + rare.plain > 0) add(rare);
  if (out.cells >
      1) {  // Wilson and Hilferty 1931: the cube root of chi-square over df is nearly normal
    const double df = static_cast<double>(out.cells - 1);
    const double variance = 2.0 / (9.0 * df);
    out.sigmas = (std::cbrt(out.chi_square / df) - (1.0 - variance)) / std::sqrt(variance);
  }
  return out;
}
