// How often a draft is accepted, worked out from the distributions of two models: for every
// position of texts that the target samples, with p of the target and q of the draft at
// --temperature,
//
//   sum min(p, q)   the token rule's acceptance of a drawn token;
//   p(argmax q)     the acceptance of llama.cpp's rule: the draft's likeliest token is drawn;
//   sum p q         the probability that two independent draws are equal;
//
// the entropies of p and q in nats, and the tokens that a verification of --windows tokens yields
// if positions were independent, by the first two. One line a prompt.
//
//   build/polyspec_overlap qwen1.5b.gguf qwen0.5b.gguf --prompts prompts.txt --temperature 0.8
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "models.hpp"
#include "options.hpp"
#include "polyspec/engines/chain.hpp"

namespace {

constexpr int64_t kRows = 32;  // read at once

// Rows [count, vocab] of the engine's predictions after each token of text from `begin` on.
std::vector<std::vector<double>> distributions(polyspec::Engine* engine, int64_t vocab,
                                               const std::vector<int64_t>& text, int64_t begin,
                                               double temperature) {
  const auto decode = [&](int64_t from, int64_t count, int64_t rows) {
    const polyspec::Outcome outcome = engine->decode(text.data() + from, count, rows);
    if (!outcome.ok()) throw std::runtime_error(outcome.message);
  };
  engine->truncate(0);
  if (begin > 0) decode(0, begin, 0);
  std::vector<std::vector<double>> out;
  const int64_t end = static_cast<int64_t>(text.size());
  for (int64_t at = begin; at < end; at += kRows) {
    const int64_t count = std::min(kRows, end - at);
    decode(at, count, count);
    for (int64_t row = 0; row < count; ++row) {
      const float* const logits = engine->logits() + row * engine->vocab_size();
      const double most = *std::max_element(logits, logits + vocab);
      std::vector<double> p(static_cast<size_t>(vocab));
      double sum = 0;
      for (size_t x = 0; x < p.size(); ++x)
        sum += p[x] = std::exp((logits[x] - most) / temperature);
      for (double& one : p) one /= sum;
      out.push_back(std::move(p));
    }
  }
  return out;
}

double entropy(const std::vector<double>& p) {
  double out = 0;
  for (const double one : p) out -= one > 0 ? one * std::log(one) : 0;
  return out;
}

// Tokens of a verification: each accepted prefix brings one more, and the last prefix the target's
// token.
double tokens_by_window(const std::vector<double>& accepted, int64_t window) {
  double sum = 0;
  for (size_t i = 0; i < accepted.size(); ++i) {
    double stands = 1;
    sum += 1;
    for (size_t j = i; j < accepted.size() && j < i + static_cast<size_t>(window); ++j)
      sum += stands *= accepted[j];
  }
  return sum / static_cast<double>(accepted.size());
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void measure(Options options) {
  const double temperature = options.settings.sampling.temperature.value;
  if (options.models.size() != 2 || options.lookup || !(temperature > 0))
    throw std::runtime_error("expected two models and a --temperature above 0");
  const int64_t window = options.windows.back();
  options.windows = {kRows};  // rows that the contexts keep
  Models models(options);
  polyspec::Engine* const target = models.engines()[0];
  polyspec::Engine* const draft = models.engines()[1];
  const int64_t vocab = std::min(target->vocab_size(), draft->vocab_size());
  polyspec::Chain plain({target}, {});
  options.settings.eos = models.end_tokens();
  for (size_t i = 0; i < options.prompts.size(); ++i) {
    const std::vector<int64_t> prompt = models.encode(options.prompts[i], options);
    std::vector<int64_t> made, text = prompt;
    const polyspec::Outcome outcome = plain.generate(prompt, options.settings, &made);
    if (!outcome.ok()) throw std::runtime_error(outcome.message);
    text.insert(text.end(), made.begin(), made.end());
    text.pop_back();  // no token after it was drawn
    const int64_t begin = static_cast<int64_t>(prompt.size()) - 1;
    const auto p = distributions(target, vocab, text, begin, temperature);
    const auto q = distributions(draft, vocab, text, begin, temperature);
    std::vector<double> least, argmax, product, of_p, of_q;
    for (size_t row = 0; row < p.size(); ++row) {
      double both = 0, common = 0;
      for (size_t x = 0; x < p[row].size(); ++x) {
        both += std::min(p[row][x], q[row][x]);
        common += p[row][x] * q[row][x];
      }
      const auto likeliest = std::max_element(q[row].begin(), q[row].end()) - q[row].begin();
      least.push_back(both);
      product.push_back(common);
      argmax.push_back(p[row][static_cast<size_t>(likeliest)]);
      of_p.push_back(entropy(p[row]));
      of_q.push_back(entropy(q[row]));
    }
    const char* const form =
        options.json
            ? "{\"prompt\": %zu, \"positions\": %zu, \"sum_min\": %.4f, \"p_argmax_q\": %.4f, "
              "\"sum_product\": %.4f, \"entropy_p\": %.4f, \"entropy_q\": %.4f, "
              "\"tokens_sum_min\": %.3f, \"tokens_p_argmax_q\": %.3f}\n"
            : "prompt %zu, %zu positions: sum min(p, q) %.4f, p(argmax q) %.4f, sum p q %.4f, "
              "entropies %.3f and %.3f, tokens by verification %.3f and %.3f\n";
    std::printf(form, i, p.size(), mean(least), mean(argmax), mean(product), mean(of_p), mean(of_q),
                tokens_by_window(least, window), tokens_by_window(argmax, window));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) {
      std::printf("polyspec_overlap TARGET.gguf DRAFT.gguf takes options of polyspec_llama:\n\n%s",
                  kHelp);
      return 0;
    }
    measure(options);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "polyspec_overlap: %s\n", error.what());
    return 2;
  }
}
