// A chain with a policy that stops drafting and asks again: the passes of its engines, and the
// reports to the policy. And chains with engines, sinks, proposers and policies at the edge of
// their contracts, or beyond it.
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "polyspec/engines/chain.hpp"
#include "support/check.hpp"

namespace {

using polyspec::Chain;
using polyspec::ChainSettings;
using polyspec::Outcome;
using polyspec::RoundReport;
using polyspec::StepReport;

constexpr int64_t kVocab = 16;

// Counts on: the likeliest token after t is t + 1.
class Counting final : public polyspec::Engine {
 public:
  struct Pass {
    int64_t from, count, rows;
  };
  explicit Counting(int64_t vocab = kVocab, int64_t context = 1000)
      : vocab_(vocab), context_(context) {}
  int64_t vocab_size() const noexcept override { return vocab_; }
  int64_t max_length() const noexcept override { return context_; }
  int64_t length() const noexcept override { return static_cast<int64_t>(read_.size()); }
  const float* logits() const noexcept override { return logits_.data(); }

  Outcome decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept override {
    passes.push_back({length(), count, rows});
    read_.insert(read_.end(), tokens, tokens + count);
    for (int64_t i = 0; i < count; ++i) CHECK(tokens[i] >= 0 && tokens[i] < vocab_);
    logits_.assign(static_cast<size_t>(rows * vocab_), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t next = (tokens[count - rows + i] + 1) % vocab_;
      logits_[static_cast<size_t>(i * vocab_ + next)] = 30;
    }
    return {};
  }
  void truncate(int64_t length) noexcept override { read_.resize(static_cast<size_t>(length)); }

  std::vector<Pass> passes;

 private:
  int64_t vocab_, context_;
  std::vector<int64_t> read_;
  std::vector<float> logits_;
};

// The windows of a list, one round after another, and the reported steps.
class Listed final : public polyspec::WindowPolicy {
 public:
  Listed(std::vector<int64_t> windows, std::vector<std::vector<StepReport>>* told)
      : windows_(std::move(windows)), told_(told) {}
  void next(const RoundReport& report, int64_t* windows) override {
    if (!report.begins) told_->emplace_back(report.steps, report.steps + report.num_steps);
    windows[0] = round_ < windows_.size() ? windows_[round_++] : 0;
  }
  void forget_row(int64_t) override {}
  void reset() override {}
  int32_t levels() const override { return 2; }

 private:
  std::vector<int64_t> windows_;
  std::vector<std::vector<StepReport>>* told_;
  size_t round_ = 0;
};

void test_a_draft_reads_what_it_has_missed_when_it_is_asked() {
  Counting target, draft;
  Chain chain({&target, &draft}, {3});
  std::vector<std::vector<StepReport>> told;
  // Plain, with drafts, plain for twelve tokens, with drafts twice.
  std::vector<int64_t> windows = {0, 3};
  windows.insert(windows.end(), 12, 0);
  windows.insert(windows.end(), {2, 2});
  chain.set_policy(std::make_unique<Listed>(windows, &told));
  ChainSettings settings;
  settings.sampling.temperature.value = 0;
  settings.max_new_tokens = 1 + 4 + 12 + 3 + 3;
  const std::vector<int64_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  std::vector<int64_t> text;
  const Outcome outcome = chain.generate(prompt, settings, &text);
  CHECK_EQ(true, outcome.ok());
  for (size_t i = 0; i < text.size(); ++i) {
    CHECK_EQ((11 + static_cast<int64_t>(i)) % kVocab, text[i]);
  }

  // {first token, tokens, rows of logits}: a pass over the unread tokens, and then one a token.
  const std::vector<std::vector<int64_t>> expected = {
      {0, 10, 0},  {10, 1, 1}, {11, 1, 1}, {12, 1, 1},  // the prompt and a token of the target's
      {13, 13, 0}, {26, 1, 1}, {27, 1, 1},              // twelve plain passes
      {28, 2, 1},  {30, 1, 1},                          // tokens unread after every round
  };
  CHECK_EQ(expected.size(), draft.passes.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK_EQ(expected[i][0], draft.passes[i].from);
    CHECK_EQ(expected[i][1], draft.passes[i].count);
    CHECK_EQ(expected[i][2], draft.passes[i].rows);
  }
  CHECK_EQ(7, chain.stats()[1].passes);
  CHECK_EQ(23, chain.stats()[1].caught_up);
  CHECK_EQ(9, target.passes[0].count);  // all of the prompt but its last token
  CHECK_EQ(0, chain.stats()[0].caught_up);

  // It is reported apart from the steps.
  for (size_t round = 0; round < told.size(); ++round) {
    const bool caught_up = round == 1 || round == 14;
    const size_t drafted = round == 1 || round >= 14;
    CHECK_EQ(1 + static_cast<size_t>(drafted) + caught_up, told[round].size());
    const StepReport& first = told[round].front();
    CHECK_EQ(caught_up, first.repeated);
    if (caught_up) {
      CHECK_EQ(2, first.level);
      CHECK_EQ(0, first.tokens);
      CHECK_EQ(1, first.batch);
      CHECK_EQ(true, first.seconds >= 0);
    }
  }
}

void test_without_a_policy_all_levels_read_the_prompt() {
  Counting target, draft;
  Chain chain({&target, &draft}, {3});
  ChainSettings settings;
  settings.max_new_tokens = 1;
  std::vector<int64_t> text;
  CHECK_EQ(true, chain.generate({1, 2, 3}, settings, &text).ok());
  CHECK_EQ(2, draft.passes.at(0).count);
}

using Ids = std::vector<int64_t>;

ChainSettings greedy(int64_t max_new_tokens) {
  ChainSettings settings;
  settings.sampling.temperature.value = 0;
  settings.max_new_tokens = max_new_tokens;
  return settings;
}

// The text is the target's: drafts and middle levels that lack ids of it are never handed one.
void test_engines_with_fewer_ids() {
  const Ids prompt = {0, 6, 3};
  Counting alone(7);
  Ids wanted, text;
  CHECK(Chain({&alone}, {}).generate(prompt, greedy(40), &wanted).ok());
  CHECK_EQ(size_t{40}, wanted.size());
  for (const int64_t middle_ids : {7, 5, 3}) {
    Counting target(7), middle(middle_ids), draft(3);
    Chain chain({&target, &middle, &draft}, {4, 2});
    CHECK(chain.generate(prompt, greedy(40), &text).ok());
    CHECK(text == wanted);
    CHECK(chain.stats()[0].accepted > 0);
  }
  Counting target(7), draft(3);
  CHECK_EQ(std::string("prompt: expected ids in [0, 7), given 7"),
           std::string(Chain({&target, &draft}, {3}).generate({7}, greedy(3), &text).message));
}

void test_an_engine_without_a_limit() {
  Counting target(kVocab, INT64_MAX), draft(kVocab, INT64_MAX);
  Chain chain({&target, &draft}, {3});
  Ids text;
  CHECK(chain.generate({1}, greedy(6), &text).ok());
  CHECK_EQ(size_t{6}, text.size());
  CHECK(chain.ended() == polyspec::Ended::kLength);
}

// Tokens that the target has emitted stay, and the chain can be used again.
void test_a_sink_that_throws() {
  Counting target, draft;
  Chain chain({&target, &draft}, {3});
  Ids wanted, text;
  CHECK(chain.generate({1, 2}, greedy(20), &wanted).ok());
  for (const bool standard : {true, false}) {
    size_t seen = 0;
    int calls = 0;
    const Outcome outcome =
        chain.generate({1, 2}, greedy(20), &text, [&](const int64_t*, int64_t count) -> bool {
          seen += static_cast<size_t>(count);
          if (++calls < 3) return true;
          if (standard) throw std::runtime_error("the sink");
          throw 42;
        });
    CHECK(outcome.code == Outcome::Code::kEngine);
    CHECK_EQ(std::string(standard ? "the sink" : "an exception of unknown type"),
             std::string(outcome.message));
    CHECK(chain.ended() == polyspec::Ended::kFailed);
    CHECK(text == Ids(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(seen)));
    CHECK(chain.generate({1, 2}, greedy(20), &text).ok());
    CHECK(text == wanted);
  }
}

// Says that it has named more tokens than it was asked for.
class Boasting final : public polyspec::Proposer {
 public:
  int64_t propose(const int64_t* text, int64_t length, int64_t most,
                  int64_t* tokens) noexcept override {
    for (int64_t i = 0; i < most; ++i) tokens[i] = (text[length - 1] + 1 + i) % kVocab;
    return INT64_MAX;
  }
};

void test_who_breaks_the_contract() {
  Counting target, draft;
  Boasting proposer;
  Ids wanted, text;
  CHECK(Chain({&target}, {}).generate({1, 2}, greedy(20), &wanted).ok());
  CHECK(Chain({&target}, {3}, &proposer).generate({1, 2}, greedy(20), &text).ok());
  CHECK(text == wanted);

  std::vector<std::vector<StepReport>> told;
  Chain chain({&target, &draft}, {3});
  chain.set_policy(std::make_unique<Listed>(Ids{2, -1}, &told));
  CHECK(!chain.generate({1, 2}, greedy(20), &text).ok());  // a window of -1 in the second round
  CHECK_EQ(size_t{3}, text.size());
  CHECK_EQ(2, chain.windows()[0]);
  Chain deeper({&target, &draft, &draft}, {3, 3});
  deeper.set_policy(std::make_unique<Listed>(Ids{2}, &told));
  CHECK_EQ(std::string("policy: expected one of 3 levels, given one of 2"),
           std::string(deeper.generate({1}, greedy(3), &text).message));

  Counting large(kVocab, INT64_MAX), small(kVocab, INT64_MAX);
  Chain endless({&large, &small}, {INT64_MAX});  // rows of logits that no memory holds
  CHECK(endless.generate({1}, greedy(int64_t{1} << 60), &text).code == Outcome::Code::kEngine);
  CHECK(text.empty());
  Counting nothing(0);
  CHECK(!Chain({&nothing}, {}).outcome().ok());
  CHECK(!Chain({&target, nullptr}, {3}).outcome().ok());
  CHECK(!chain.generate({1}, greedy(3), nullptr).ok());
}

}  // namespace

int main() {
  test_a_draft_reads_what_it_has_missed_when_it_is_asked();
  test_without_a_policy_all_levels_read_the_prompt();
  test_engines_with_fewer_ids();
  test_an_engine_without_a_limit();
  test_a_sink_that_throws();
  test_who_breaks_the_contract();
  std::puts("chain_windows_test: all passed");
}
