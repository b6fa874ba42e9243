// The chain is lossless, by exact enumeration: for chains of 2, 3 and 4 toy models, all windows up
// to 4, both rules and several filters, the distribution of the emitted text equals that of the
// target alone to 1e-12 in total variation; so also with bounded rounds. Everything runs through
// the production Scheduler, sample and verify. Then mistakes are planted, and must show.
#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "exactness/enumeration/chain.hpp"
#include "exactness/enumeration/mutations.hpp"

namespace {

using namespace enumeration;
using polyspec::Rule;
using polyspec::SamplingParams;

constexpr double kExact = 1e-12;  // total variation that double sums of exact integers leave
constexpr double kFloat =
    1e-5;  // difference of float logits and the integer distribution from double arithmetic
constexpr double kVisible = 0.01;  // total variation that every planted mistake must exceed

struct Filter {
  const char* name;
  SamplingParams sampling;
};

SamplingParams filter(float temperature, int64_t top_k, float top_p, float min_p) {
  SamplingParams s;
  s.temperature.value = temperature;
  s.top_k.value = top_k;
  s.top_p.value = top_p;
  s.min_p.value = min_p;
  return s;
}

const Filter kNone{"none", filter(1.0f, 0, 1.0f, 0.0f)};
const Filter kTemperature{"temperature .6", filter(0.6f, 0, 1.0f, 0.0f)};
const Filter kTopK{"top-k 2", filter(1.0f, 2, 1.0f, 0.0f)};
const Filter kTopP{"top-p .75", filter(1.0f, 0, 0.75f, 0.0f)};
const Filter kMinP{"min-p .3", filter(1.0f, 0, 1.0f, 0.3f)};
const Filter kAll{"all filters", filter(1.4f, 3, 0.9f, 0.1f)};
const Filter kGreedy{"greedy", filter(0.0f, 0, 1.0f, 0.0f)};

// Models of one family: the target and its ever less faithful approximations.
ToyChain toy_chain(int levels, int64_t vocab, int eos, const Filter& filter, Rule rule,
                   int hole_one_in = 0) {
  ToyChain chain;
  for (int i = 0; i < levels; ++i) {
    chain.levels.emplace_back(vocab, 11, 100 + i, i == 0 ? 0.0 : 0.3 + 0.3 * i, hole_one_in);
  }
  chain.sampling = filter.sampling;
  chain.rule = rule;
  chain.eos = eos;
  return chain;
}

// All windows 0 ... 4 for each level but the last, the first varying slowest.
std::vector<std::vector<int64_t>> all_windows(int levels) {
  std::vector<std::vector<int64_t>> all{{}};
  for (int i = 1; i < levels; ++i) {
    std::vector<std::vector<int64_t>> longer;
    for (const auto& windows : all) {
      for (int64_t w = 0; w <= 4; ++w) {
        longer.push_back(windows);
        longer.back().push_back(w);
      }
    }
    all = std::move(longer);
  }
  return all;
}

double mass(const TextDistribution& distribution) {
  double sum = 0.0;
  for (const auto& [text, p] : distribution) sum += p;
  return sum;
}

const char* name(Rule rule) { return rule == Rule::kToken ? "token" : "block"; }

// Both rules, all windows: exact. Prints one line.
void prove(const std::string& label, ToyChain chain, int64_t length) {
  for (Rule rule : {Rule::kToken, Rule::kBlock}) {
    chain.rule = rule;
    Enumerator enumerator(chain);
    const TextDistribution target = enumerator.target_statistics(length);
    const double to_softmax = total_variation(target, enumerator.softmax_distribution(length));
    double worst = 0.0, most = 0.0;
    const auto windows = all_windows(chain.count());
    for (const auto& w : windows) {
      const Enumerator::Run run = enumerator.run(w, length);
      CHECK_NEAR(1.0, mass(run.texts), kExact);
      const double tv = total_variation(run.texts, target);
      if (!(tv < kExact)) {
        std::printf("%s, %s rule, windows", label.c_str(), name(rule));
        for (int64_t x : w) std::printf(" %d", static_cast<int>(x));
        std::printf("\n");
      }
      CHECK_BELOW(kExact, tv);
      worst = std::max(worst, tv);
      most = std::max(most, run.emitted / run.target_passes);
    }
    CHECK_BELOW(kFloat, to_softmax);
    CHECK_BELOW(kExact, enumerator.worst_deviation());
    std::printf("%-49s %-5s %4zu %2d %8.1e %8.1e %8.1e %7zu %6.2f\n", label.c_str(), name(rule),
                windows.size(), static_cast<int>(length), worst, to_softmax,
                enumerator.worst_deviation(), enumerator.verifications(), most);
    std::fflush(stdout);
  }
}

void prove_chains() {
  std::printf("%-49s %-5s %4s %2s %8s %8s %8s %7s %6s\n", "chain", "rule", "wins", "N", "TV",
              "softmax", "formula", "verified", "tok/M1");
  const std::vector<Filter> filters{kNone, kTemperature, kTopK, kTopP, kMinP, kAll, kGreedy};
  const auto label = [](int levels, int64_t vocab, const std::string& rest) {
    return std::to_string(levels) + " levels, " + std::to_string(vocab) + " tokens, " + rest;
  };
  const Rule any = Rule::kToken;
  for (const Filter& f : filters) prove(label(2, 4, f.name), toy_chain(2, 4, -1, f, any), 5);
  for (const Filter& f : filters) prove(label(3, 3, f.name), toy_chain(3, 3, -1, f, any), 6);
  for (const Filter& f : {kNone, kAll, kGreedy})
    prove(label(4, 3, f.name), toy_chain(4, 3, -1, f, any), 5);
  // Four levels fill a window of 4 at every level from seven tokens on.
  prove(label(4, 3, "top-k 2"), toy_chain(4, 3, -1, kTopK, any), 7);
  prove(label(4, 3, "EOS"), toy_chain(4, 3, 2, kNone, any), 7);

  prove(label(2, 5, "EOS"), toy_chain(2, 5, 4, kNone, any), 5);
  prove(label(3, 4, "EOS"), toy_chain(3, 4, 3, kNone, any), 5);
  prove(label(3, 3, "EOS, top-p .75"), toy_chain(3, 3, 2, kTopP, any), 6);
  prove(label(3, 3, "logits of -inf"), toy_chain(3, 3, -1, kNone, any, 3), 6);
  prove(label(3, 4, "logits of -inf, EOS, all"), toy_chain(3, 4, 3, kAll, any, 4), 5);

  ToyChain chain = toy_chain(3, 3, 2, kNone, any);
  chain.hand_up_statistics = false;
  prove(label(3, 3, "EOS, draft rows reduced again"), chain, 5);
  chain = toy_chain(3, 3, 2, kAll, any);
  chain.deterministic_drafter = true;
  prove(label(3, 3, "EOS, all, deterministic drafter"), chain, 5);
  chain = toy_chain(3, 4, 3, kNone, any);
  chain.levels.back() = ToyModel(3, 11, 102, 0.9);
  chain.draft_of = {1, -1, 0, 2};
  prove(label(3, 4, "EOS, drafter knows 3, id map"), chain, 5);
  chain.draft_of = {};
  chain.hand_up_statistics = false;
  prove(label(3, 4, "EOS, drafter knows the first 3"), chain, 5);
}

// Levels that verify once so many blocks have come, although their windows have room for more.
void prove_rounds() {
  struct Bounded {
    std::vector<int64_t> windows, rounds;
  };
  const auto bounded = [](const char* label, ToyChain chain, int64_t length,
                          const std::vector<Bounded>& all) {
    for (Rule rule : {Rule::kToken, Rule::kBlock}) {
      chain.rule = rule;
      Enumerator enumerator(chain);
      const TextDistribution target = enumerator.target_statistics(length);
      for (const auto& [windows, rounds] : all) {
        const Enumerator::Run run = enumerator.run(windows, length, nullptr, rounds);
        CHECK_NEAR(1.0, mass(run.texts), kExact);
        const double tv = total_variation(run.texts, target);
        const double free_passes = enumerator.run(windows, length).target_passes;
        std::printf("%-29s %-5s rounds", label, name(rule));
        for (int64_t r : rounds) std::printf(" %d", static_cast<int>(r));
        std::printf(": TV %.1e, passes of M_1 %.3f, without bounds %.3f\n", tv, run.target_passes,
                    free_passes);
        CHECK_BELOW(kExact, tv);
        CHECK_ABOVE(free_passes, run.target_passes);  // the bound did something
      }
      CHECK_BELOW(kExact, enumerator.worst_deviation());
    }
  };
  const Rule any = Rule::kToken;
  const std::vector<Bounded> three{{{6, 1}, {1, 0}}, {{6, 2}, {2, 0}}, {{6, 1}, {3, 0}}};
  const std::vector<Bounded> four{
      {{6, 6, 1}, {1, 2, 0}}, {{6, 6, 1}, {2, 1, 0}}, {{6, 3, 2}, {2, 2, 0}}};
  bounded("3 levels, 3 tokens, none", toy_chain(3, 3, -1, kNone, any), 6, three);
  bounded("3 levels, 3 tokens, EOS, all", toy_chain(3, 3, 2, kAll, any), 6, three);
  bounded("4 levels, 3 tokens, none", toy_chain(4, 3, -1, kNone, any), 6, four);
  bounded("4 levels, 3 tokens, EOS", toy_chain(4, 3, 2, kNone, any), 6, four);
  bounded("4 levels, 3 tokens, EOS, all", toy_chain(4, 3, 2, kAll, any), 6, four);
}

// Windows may move with the pending tokens, even with unverified drafts: no sampled token is
// dropped.
void prove_moving_windows() {
  const auto peek = [](const std::vector<Text>& pending) -> std::vector<int64_t> {
    const Text& drafts = pending.back();
    if (!drafts.empty() && drafts.back() == 0) return {1, 1};
    if (!drafts.empty() && drafts.back() == 1) return {0, 4};
    return {static_cast<int64_t>(1 + pending[0].size() % 3), 2};
  };
  for (Rule rule : {Rule::kToken, Rule::kBlock}) {
    Enumerator enumerator(toy_chain(3, 3, 2, kNone, rule));
    const double tv =
        total_variation(enumerator.run({4, 4}, 6, peek).texts, enumerator.target_statistics(6));
    std::printf("windows moved by a look at the drafts, %s rule: TV %.1e\n", name(rule), tv);
    CHECK_BELOW(kExact, tv);
  }
}

// A verification by the block rule emits no fewer tokens on average, after every text and for every
// window.
void compare_rules() {
  double token_sum = 0.0, block_sum = 0.0, largest = 0.0;
  for (const Filter& f : {kNone, kTopP, kAll}) {
    Enumerator token(toy_chain(2, 3, -1, f, Rule::kToken)),
        block(toy_chain(2, 3, -1, f, Rule::kBlock));
    const auto expected = [](Enumerator& enumerator, const Text& text, int64_t window) {
      double tokens = 0.0;
      for (const auto& proposal : enumerator.propose(text, window)) {
        const Text pending(proposal.tokens.begin(), proposal.tokens.end());
        for (const Outcome& o : enumerator.verify(0, text, pending, proposal.statistics)) {
          tokens += proposal.probability * o.probability * static_cast<double>(o.tokens.size());
        }
      }
      return tokens;
    };
    for (const Text& text : {Text(), Text{0, 1}, Text{2, 2}, Text{1, 0}}) {
      for (int64_t window = 0; window <= 4; ++window) {
        const double by_token = expected(token, text, window),
                     by_block = expected(block, text, window);
        CHECK(by_block > by_token - kExact);
        if (window <= 1)
          CHECK_NEAR(by_token, by_block, kExact);  // the rules agree on a single token
        if (window == 4) {
          token_sum += by_token;
          block_sum += by_block;
          largest = std::max(largest, by_block - by_token);
        }
      }
    }
  }
  CHECK_ABOVE(0.01, largest);  // and are not one and the same
  std::printf("tokens per target pass, window 4, mean of 12: token rule %.4f, block rule %.4f\n",
              token_sum / 12, block_sum / 12);
}

// Each of these changes the distribution of the text.
void catch_mutations() {
  const ToyChain chain = toy_chain(3, 3, -1, kNone, Rule::kToken);
  const int64_t length = 5;
  Enumerator honest(chain);
  const TextDistribution target = honest.target_statistics(length);
  const auto check = [&](const char* what, const TextDistribution& texts) {
    CHECK_NEAR(1.0, mass(texts), 1e-9);
    const double tv = total_variation(texts, target);
    std::printf("mutation: %-52s TV %.3f\n", what, tv);
    CHECK_ABOVE(kVisible, tv);
  };
  const std::vector<int64_t> windows{3, 3};
  CHECK_BELOW(kExact, total_variation(honest.run(windows, length).texts, target));
  check("q = p3 at M_1", DrafterDistributionAtTarget(chain).run(windows, length).texts);
  check("M_2 resamples from p2 and not from the residual",
        NoResidual(chain).run(windows, length).texts);
  check("M_2's correction is dropped", NoCorrection(chain).run(windows, length).texts);
  check("a low-confidence tail is dropped after sampling",
        DroppedTail(chain).run(windows, length).texts);
  check("typical acceptance at M_2", TypicalAcceptance(chain).run(windows, length).texts);
  check("Algorithm 1 literally", AlgorithmOne(chain).texts(2, 4, length));

  const ToyChain pair = toy_chain(2, 3, -1, kNone, Rule::kBlock);
  const TextDistribution own = Enumerator(pair).target_statistics(length);
  for (const int64_t window : {1, 2, 3}) {
    const double tv = total_variation(UncappedLastTest(pair).run({window}, length).texts, own);
    std::printf("mutation: %-48s K=%d TV %.3f\n", "block rule, last test uncapped",
                static_cast<int>(window), tv);
    if (window == 1) CHECK_BELOW(kExact, tv);
    if (window > 1) CHECK_ABOVE(kVisible, tv);
  }
}

}  // namespace

int main() {
  const auto begin = std::chrono::steady_clock::now();
  prove_chains();
  prove_rounds();
  prove_moving_windows();
  compare_rules();
  catch_mutations();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%.1f s\n", seconds.count());
  return 0;
}
