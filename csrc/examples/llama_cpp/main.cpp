// A chain of GGUF models inside llama.cpp, in C++ alone. get.py brings the engine and models:
//
//   python3 get.py llama.cpp qwen1.5b qwen0.5b
//   cmake -S . -B build -DCMAKE_PREFIX_PATH="<where polyspec was installed>;<output of get.py>"
//   cmake --build build
//   build/polyspec_llama qwen1.5b.gguf qwen0.5b.gguf --prompt "Write a binary search in C."
//
// models.* loads, options.* reads the command line; a program that has its contexts already needs
// only generate() below.
//
// Exit status: 0; 1 when a text could not be finished; 2 for bad usage or input.
#include <cstdio>
#include <exception>
#include <memory>

#include "ggml.h"
#include "models.hpp"
#include "options.hpp"
#include "polyspec/engines/chain.hpp"
#include "polyspec/engines/lookup.hpp"

namespace {

const char* const kEnded[] = {"length", "eos", "context", "stopped", "failed"};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(c));
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 32) {
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string joined(const std::vector<int64_t>& values, const char* between) {
  std::string out;
  for (const int64_t value : values) out += (out.empty() ? "" : between) + std::to_string(value);
  return out;
}

void print_json(const polyspec::Chain& chain, const polyspec::Outcome& outcome, size_t prompt,
                uint64_t seed, double seconds, const std::vector<int64_t>& ids,
                const std::string& text) {
  std::printf("{\"prompt\": %zu, \"seed\": %llu, \"ended\": \"%s\", \"message\": %s, ", prompt,
              static_cast<unsigned long long>(seed), kEnded[static_cast<int>(chain.ended())],
              quoted(outcome.message).c_str());
  std::printf("\"prompt_seconds\": %.6f, \"seconds\": %.6f, \"levels\": [", chain.prompt_seconds(),
              seconds);
  const char* between = "";
  for (const polyspec::LevelStats& s : chain.stats()) {
    std::printf("%s{\"passes\": %lld, \"verifications\": %lld, \"proposed\": %lld, ", between,
                static_cast<long long>(s.passes), static_cast<long long>(s.verifications),
                static_cast<long long>(s.proposed));
    std::printf("\"accepted\": %lld, \"emitted\": %lld, \"caught_up\": %lld, \"seconds\": %.6f}",
                static_cast<long long>(s.accepted), static_cast<long long>(s.emitted),
                static_cast<long long>(s.caught_up), s.seconds);
    between = ", ";
  }
  std::printf("], \"ids\": [%s], \"text\": %s}\n", joined(ids, ", ").c_str(), quoted(text).c_str());
}

void print_stats(const polyspec::Chain& chain, size_t tokens, double seconds) {
  const double decoding = seconds - chain.prompt_seconds();
  std::fprintf(stderr, "\n%zu tokens (%s) in %.2f s, %.2f s of them the prompt's: %.1f tokens/s\n",
               tokens, kEnded[static_cast<int>(chain.ended())], seconds, chain.prompt_seconds(),
               decoding > 0 ? static_cast<double>(tokens) / decoding : 0.0);
  std::fprintf(stderr, "%-7s%-8s%-15s%-10s%-10s%-9s%-9s%s\n", "level", "passes", "verifications",
               "proposed", "accepted", "emitted", "seconds", "tokens per verification");
  for (size_t i = 0; i < chain.stats().size(); ++i) {
    const polyspec::LevelStats& s = chain.stats()[i];
    std::fprintf(stderr, "%-7zu%-8lld%-15lld%-10lld%-10lld%-9lld%-9.2f%.2f\n", i + 1,
                 static_cast<long long>(s.passes), static_cast<long long>(s.verifications),
                 static_cast<long long>(s.proposed), static_cast<long long>(s.accepted),
                 static_cast<long long>(s.emitted), s.seconds, s.mean_acceptance_length());
  }
}

int generate(const Options& options) {
  Models models(options);
  polyspec::PromptLookup lookup;
  polyspec::Chain chain(models.engines(), options.windows, options.lookup ? &lookup : nullptr);
  polyspec::ChainSettings settings = options.settings;
  if (!options.ignore_eos) settings.eos = models.end_tokens();
  if (!options.policy.empty()) {
    polyspec::PolicyOptions policy;
    policy.kind = policy_kinds().at(options.policy);
    policy.windows = options.windows;
    chain.set_policy(polyspec::make_policy(policy));
  }

  int status = 0;
  for (size_t i = 0; i < options.prompts.size(); ++i) {
    const std::vector<int64_t> prompt = models.encode(options.prompts[i], options);
    for (int64_t n = 0; n < options.texts; ++n) {
      settings.seed = options.settings.seed + static_cast<uint64_t>(n);
      const auto show = [&](const int64_t* tokens, int64_t count) {
        const std::string piece = options.ids ? "" : models.decode(tokens, count);
        std::fwrite(piece.data(), 1, piece.size(), stdout);
        std::fflush(stdout);
        return true;
      };
      std::vector<int64_t> ids;
      const auto began = std::chrono::steady_clock::now();
      const polyspec::Outcome outcome = chain.generate(
          prompt, settings, &ids, options.json ? polyspec::TokenSink() : polyspec::TokenSink(show));
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
      if (options.json) {
        const std::string text =
            options.ids ? "" : models.decode(ids.data(), static_cast<int64_t>(ids.size()));
        print_json(chain, outcome, i, settings.seed, spent.count(), ids, text);
      } else {
        std::printf("%s\n", options.ids ? joined(ids, " ").c_str() : "");
        print_stats(chain, ids.size(), spent.count());
      }
      if (outcome.ok()) continue;
      std::fprintf(stderr, "polyspec_llama: %s\n", outcome.message);
      status = 1;
    }
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) {
      std::fputs(kHelp, stdout);
      std::printf("\nllama.cpp: ggml %s, commit %s\n", ggml_version(), ggml_commit());
      return 0;
    }
    return generate(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "polyspec_llama: %s\n", error.what());
    return 2;
  }
}
