// A chain of n-gram models in C++ alone: no torch, no Python, no CUDA.
//
//   cmake -S . -B build -DCMAKE_PREFIX_PATH=<where polyspec was installed>
//   cmake --build build
//   build/ngram_chain text.txt --temperature 0
//
// polyspec/engines/chain.hpp holds the loop over polyspec's sample, verify and Scheduler; a model
// of yours is an Engine (polyspec/engines/engine.hpp). ngram.* is an Engine, compare.* has the
// checks of losslessness, options.* the command line. The models here cost the same at every order,
// so the example shows how seldom the target has to run, not a speedup.
//
// Exit status: 0; 1 when greedy texts, or the distributions of --trials, differ; 2 for bad usage or
// input.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>

#include "compare.hpp"
#include "ngram.hpp"
#include "options.hpp"

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open the text file '" + path + "'");
  std::string text;
  try {  // a folder opens well, but cannot be read
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure&) {
    throw std::runtime_error("cannot read the text file '" + path + "'");
  }
  if (text.empty()) throw std::runtime_error("the text file '" + path + "' is empty");
  return text;
}

void print_stats(const std::vector<polyspec::LevelStats>& stats,
                 const std::vector<int64_t>& orders) {
  std::printf("%-7s%-7s%-16s%-15s%-10s%-10s%-9s%s\n", "level", "order", "forward passes",
              "verifications", "proposed", "accepted", "emitted", "mean acceptance length");
  for (size_t i = 0; i < stats.size(); ++i) {
    const polyspec::LevelStats& s = stats[i];
    std::printf("%-7zu%-7lld", i + 1, static_cast<long long>(orders[i]));
    if (i + 1 == stats.size()) {  // the drafter verifies nothing
      std::printf("%-16lld%-15s%-10s%-10s%-9lld%s\n", static_cast<long long>(s.passes), "-", "-",
                  "-", static_cast<long long>(s.emitted), "-");
    } else {
      std::printf("%-16lld%-15lld%-10lld%-10lld%-9lld%.3f\n", static_cast<long long>(s.passes),
                  static_cast<long long>(s.verifications), static_cast<long long>(s.proposed),
                  static_cast<long long>(s.accepted), static_cast<long long>(s.emitted),
                  s.mean_acceptance_length());
    }
  }
}

int run(const Options& options) {
  const std::string text = read_file(options.text_file);
  const Vocabulary vocabulary(text);
  const std::vector<int64_t> corpus = vocabulary.encode(text);

  std::vector<std::unique_ptr<NgramModel>> models;
  std::vector<polyspec::Engine*> levels;
  for (const int64_t order : options.orders) {
    models.push_back(std::make_unique<NgramModel>(order, vocabulary.size(), corpus));
    levels.push_back(models.back().get());
  }
  polyspec::Chain chain(levels, options.windows);
  if (!options.policy.empty()) {
    polyspec::PolicyOptions policy;
    policy.kind = policy_kinds().at(options.policy);
    policy.windows = options.windows;
    chain.set_policy(polyspec::make_policy(policy));
  }

  polyspec::ChainSettings settings = options.settings;
  if (!options.stop.empty()) settings.eos = vocabulary.encode(options.stop);
  const std::string prompt_text = options.prompt.empty() ? text.substr(0, 32) : options.prompt;
  const std::vector<int64_t> prompt = vocabulary.encode(prompt_text);

  std::printf("text: %zu bytes, vocabulary: %lld tokens, levels: %zu\n\n", text.size(),
              static_cast<long long>(vocabulary.size()), levels.size());
  std::vector<int64_t> chained;
  const polyspec::Outcome outcome = chain.generate(prompt, settings, &chained);
  if (!outcome.ok()) throw std::runtime_error(outcome.message);
  std::printf("--- chain ---\n%s%s\n--- end ---\n\n", prompt_text.c_str(),
              vocabulary.decode(chained).c_str());
  print_stats(chain.stats(), options.orders);

  const std::vector<int64_t> plain = generate_plainly(*levels[0], prompt, settings);
  const double per_token = static_cast<double>(chain.stats()[0].passes) /
                           static_cast<double>(std::max<size_t>(chained.size(), 1));
  std::printf("\n%-7s%-9s%-25s%s\n", "", "tokens", "target passes per token",
              "cross-entropy under the target");
  std::printf("%-7s%-9zu%-25.3f%.3f\n", "chain", chained.size(), per_token,
              cross_entropy(*levels[0], prompt, chained));
  std::printf("%-7s%-9zu%-25.3f%.3f\n\n", "plain", plain.size(), 1.0,
              cross_entropy(*levels[0], prompt, plain));

  if (options.trials > 0) {
    const Comparison c = compare_distributions(chain, *levels[0], prompt, settings, options.trials);
    const bool same = c.sigmas < 4.75;
    std::printf(
        "distributions: chain and plain %s over %lld trials (%lld cells, chi-square %.1f, %.2f "
        "sigmas)\n",
        same ? "agree" : "DIFFER", static_cast<long long>(options.trials),
        static_cast<long long>(c.cells), c.chi_square, c.sigmas);
    if (!same) return 1;
  }
  if (settings.sampling.temperature.value != 0) {
    std::printf("sampled: the two texts above have one distribution, not the same tokens\n");
    return 0;
  }
  const size_t shorter = std::min(plain.size(), chained.size());
  const auto parted =
      std::mismatch(plain.begin(), plain.begin() + static_cast<int64_t>(shorter), chained.begin());
  if (plain == chained) {
    std::printf("greedy: chain and plain decoding gave identical tokens\n");
    return 0;
  }
  std::printf("greedy: chain and plain decoding DIFFER from token %lld on\n",
              static_cast<long long>(parted.first - plain.begin()));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) {
      std::fputs(kHelp, stdout);
      return 0;
    }
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ngram_chain: %s\n", error.what());
    return 2;
  }
}
