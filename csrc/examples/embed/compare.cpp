#include "compare.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <utility>

namespace {

void require_ok(const polyspec::Outcome& outcome) {
  if (!outcome.ok()) throw std::runtime_error(outcome.message);
}

}  // namespace

std::vector<int64_t> generate_plainly(polyspec::Engine& target, const std::vector<int64_t>& prompt,
                                      const polyspec::ChainSettings& settings) {
  std::vector<int64_t> text;
  target.truncate(0);
  require_ok(target.decode(prompt.data(), static_cast<int64_t>(prompt.size()), 1));
  int64_t token = -1;
  float logprob = 0;
  int32_t status = 0;
  polyspec::SampleParams p;
  p.batch = 1;
  p.vocab = target.vocab_size();
  p.sampling = settings.sampling;
  p.draw.seed.value = settings.seed;
  p.tokens = &token;
  p.logprobs = &logprob;
  p.status = &status;
  for (int64_t i = 0; i < settings.max_new_tokens; ++i) {
    if (i > 0) require_ok(target.decode(&token, 1, 1));
    p.logits = target.logits();
    p.draw.position.value = target.length();
    const polyspec::Result result = polyspec::sample(p, polyspec::Stream::cpu(settings.executor));
    if (!result.ok()) throw std::runtime_error(result.message);
    if (token < 0) throw std::runtime_error("the target's logits have no distribution");
    text.push_back(token);
    if (std::count(settings.eos.begin(), settings.eos.end(), token) > 0) break;
  }
  return text;
}

double cross_entropy(polyspec::Engine& target, const std::vector<int64_t>& prompt,
                     const std::vector<int64_t>& text) {
  if (text.empty()) return 0;
  const int64_t rows = static_cast<int64_t>(text.size());
  std::vector<int64_t> tokens = prompt;
  tokens.insert(tokens.end(), text.begin(), text.end() - 1);
  target.truncate(0);
  require_ok(target.decode(tokens.data(), static_cast<int64_t>(tokens.size()), rows));
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) {
    sum -= target.logits()[r * target.vocab_size() + text[static_cast<size_t>(r)]];
  }
  return sum / static_cast<double>(text.size());
}

namespace {

struct Counts {
  double chain = 0;
  double plain = 0;
};

// Tokens from the middle of the text: in mid-block, after accepted and after corrected tokens.
std::pair<int64_t, int64_t> cell(const std::vector<int64_t>& text) {
  return {text.size() < 3 ? -1 : text[2], text.size() < 4 ? -1 : text[3]};
}

}  // namespace

Comparison compare_distributions(polyspec::Chain& chain, polyspec::Engine& target,
                                 const std::vector<int64_t>& prompt,
                                 polyspec::ChainSettings settings, int64_t trials) {
  settings.max_new_tokens = 6;  // longer than the counted part, so that blocks are verified and cut
  std::map<std::pair<int64_t, int64_t>, Counts> cells;
  std::vector<int64_t> text;
  for (int64_t i = 0; i < trials; ++i, ++settings.seed) {
    require_ok(chain.generate(prompt, settings, &text));
    ++cells[cell(text)].chain;
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
