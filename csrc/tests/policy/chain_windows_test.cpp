// A chain whose policy stops drafting and asks again: which passes its engines are asked for, and
// what the policy is told of them.
#include <cstdio>
#include <memory>
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
  int64_t vocab_size() const noexcept override { return kVocab; }
  int64_t max_length() const noexcept override { return 1000; }
  int64_t length() const noexcept override { return static_cast<int64_t>(read_.size()); }
  const float* logits() const noexcept override { return logits_.data(); }

  Outcome decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept override {
    passes.push_back({length(), count, rows});
    read_.insert(read_.end(), tokens, tokens + count);
    logits_.assign(static_cast<size_t>(rows * kVocab), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t next = (tokens[count - rows + i] + 1) % kVocab;
      logits_[static_cast<size_t>(i * kVocab + next)] = 30;
    }
    return {};
  }
  void truncate(int64_t length) noexcept override { read_.resize(static_cast<size_t>(length)); }

  std::vector<Pass> passes;

 private:
  std::vector<int64_t> read_;
  std::vector<float> logits_;
};

// The windows of a list, one round after another, and the steps it was told of.
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

  // {first token, tokens, rows of logits}: a pass over what was missed, and then one a token.
  const std::vector<std::vector<int64_t>> expected = {
      {0, 10, 0},  {10, 1, 1}, {11, 1, 1}, {12, 1, 1},  // the prompt and a token of the target's
      {13, 13, 0}, {26, 1, 1}, {27, 1, 1},              // twelve plain ones
      {28, 2, 1},  {30, 1, 1},                          // what it is behind after every round
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

  // The policy is told of it apart from the steps.
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

}  // namespace

int main() {
  test_a_draft_reads_what_it_has_missed_when_it_is_asked();
  test_without_a_policy_all_levels_read_the_prompt();
  std::puts("chain_windows_test: all passed");
}
