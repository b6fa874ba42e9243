#include "chain.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "polyspec/polyspec.h"  // polyspec_status_string

Chain::Chain(std::vector<Level*> levels, std::vector<int64_t> windows)
    : levels_(std::move(levels)), scheduler_(std::move(windows)) {
  if (static_cast<size_t>(scheduler_.levels()) != levels_.size()) {
    throw std::invalid_argument("a chain of n levels takes n - 1 windows: got " +
                                std::to_string(levels_.size()) + " levels and " +
                                std::to_string(scheduler_.windows().size()) + " windows");
  }
  vocab_ = levels_[0]->vocab_size();
  for (const Level* level : levels_) {
    if (level->vocab_size() != vocab_) {
      throw std::invalid_argument("all levels of a chain share one vocabulary");
    }
  }
}

std::vector<int64_t> Chain::generate(const std::vector<int64_t>& prompt, const Settings& settings) {
  tokens_ = prompt;
  pending_.assign(levels_.size() - 1, {});
  rounds_.assign(levels_.size(), 0);
  stats_.assign(levels_.size(), {});
  for (Level* level : levels_) level->rollback(0);  // nothing is left of an earlier text

  scheduler_.set_tail(settings.tail);
  scheduler_.start(settings.max_new_tokens);
  steps_.clear();
  choose_windows(prompt);
  while (true) {
    const polyspec::Step step = scheduler_.next();
    if (step.kind == polyspec::Step::Kind::kDone) break;
    bool eos = false;
    const auto began = std::chrono::steady_clock::now();
    const int64_t before = stats_[static_cast<size_t>(step.level - 1)].accepted;
    const int64_t emitted = step.kind == polyspec::Step::Kind::kDraft
                                ? draft(step, settings, &eos)
                                : verify(step.level, settings, &eos);
    scheduler_.report(step.level, emitted, eos);
    if (policy_ == nullptr) continue;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    const bool drafted = step.kind == polyspec::Step::Kind::kDraft;
    const int64_t width = drafted ? emitted : step.count;
    // A tail's tokens say nothing of the level below, whose acceptance policies estimate.
    const int64_t tokens = drafted ? emitted : step.count - step.of_tail;
    const int64_t stands = stats_[static_cast<size_t>(step.level - 1)].accepted - before;
    const int64_t accepted = std::min(stands, tokens);
    steps_.push_back({step.level, tokens, accepted, width, 1, spent.count(), false});
    if (step.level == 1) choose_windows({tokens_.end() - emitted, tokens_.end()});
  }
  return {tokens_.begin() + static_cast<int64_t>(prompt.size()), tokens_.end()};
}

// Before a round of the target, when nothing is pending; `told`: the prompt, or what the round that
// is over has committed.
void Chain::choose_windows(const std::vector<int64_t>& told) {
  if (policy_ == nullptr) return;
  polyspec::RoundReport report;
  report.begins = steps_.empty();
  report.steps = steps_.data();
  report.num_steps = static_cast<int64_t>(steps_.size());
  report.tokens = told.data();
  report.num_tokens = static_cast<int64_t>(told.size());
  std::vector<int64_t> windows(scheduler_.windows().size());
  policy_->next(report, windows.data());
  scheduler_.set_windows(std::move(windows));
  steps_.clear();
}

// The last level proposes up to `step.count` tokens for the level above, or of a tail for level 1;
// fewer if one of them ends the text.
int64_t Chain::draft(const polyspec::Step& step, const Settings& settings, bool* eos) {
  const int32_t level = scheduler_.levels();
  Pending& block = step.of_tail > 0 ? pending_.front() : pending_.back();
  polyspec::SampleParams p;
  p.batch = 1;
  p.vocab = vocab_;
  p.sampling = settings.sampling;
  int64_t drawn = 0;
  while (drawn < step.count && !*eos) {
    const int64_t position = static_cast<int64_t>(tokens_.size());
    block.logits.resize(static_cast<size_t>((block.count + 1) * vocab_));
    block.statistics.resize(static_cast<size_t>(block.count + 1));
    float* row = block.logits.data() + block.count * vocab_;
    levels_.back()->forward(tokens_, position, 1, row);
    ++stats_.back().forward_passes;

    int64_t token = -1;
    float logprob = 0;
    int32_t status = 0;
    p.logits = row;
    p.draw = draw_key(level, position, settings);
    p.tokens = &token;
    p.logprobs = &logprob;
    p.status = &status;
    p.statistics = &block.statistics[static_cast<size_t>(block.count)];
    const polyspec::Result result = polyspec::sample(p, polyspec::Stream::cpu(settings.executor));
    require_ok(result, status, level, position);

    tokens_.push_back(token);
    ++block.count;
    ++drawn;
    *eos = token == settings.eos;
  }
  ++rounds_.back();
  stats_.back().emitted += drawn;
  return drawn;
}

// Level `level` verifies all that is pending for it and hands up what stands. Returns how many
// tokens that is.
int64_t Chain::verify(int32_t level, const Settings& settings, bool* eos) {
  const size_t index = static_cast<size_t>(level - 1);
  Pending& block = pending_[index];
  LevelStats& stats = stats_[index];
  const int64_t first = first_pending(level);
  const int64_t rows = block.count + 1;

  logits_.resize(static_cast<size_t>(rows * vocab_));
  levels_[index]->forward(tokens_, first, rows, logits_.data());  // one pass over the whole block

  std::vector<int64_t> emitted(static_cast<size_t>(rows));
  std::vector<float> logprobs(emitted.size());
  std::vector<polyspec::RowStatistics> statistics(emitted.size());
  int64_t accepted = 0;
  int32_t status = 0;
  polyspec::VerifyParams p;
  p.batch = 1;
  p.draft_len = block.count;
  p.vocab = p.draft_vocab = vocab_;
  p.target_logits = logits_.data();
  p.target_stride[0] = rows * vocab_;
  p.target_stride[1] = vocab_;
  if (block.count > 0) {  // q: the rows of the level that drew each token, and of no other
    p.draft_logits = block.logits.data();
    p.draft_stride[0] = block.count * vocab_;
    p.draft_stride[1] = vocab_;
    p.draft_statistics = block.statistics.data();
    p.draft_tokens = tokens_.data() + first;
    p.draft_tokens_stride = block.count;
  }
  p.sampling = settings.sampling;
  p.draw = draw_key(level, first, settings);
  p.rule = settings.rule;
  p.tokens = emitted.data();
  p.num_accepted = &accepted;
  p.logprobs = logprobs.data();
  p.status = &status;
  p.statistics = statistics.data();
  const polyspec::Result result = polyspec::verify(p, polyspec::Stream::cpu(settings.executor));
  require_ok(result, status, level, first + accepted);

  int64_t count = accepted + 1;  // the text ends with its first EOS, but keeps it
  const auto end = std::find(emitted.begin(), emitted.begin() + count, settings.eos);
  *eos = end != emitted.begin() + count;
  if (*eos) count = end - emitted.begin() + 1;

  ++stats.forward_passes;
  ++stats.verifications;
  stats.proposed += block.count;
  stats.accepted += std::min(accepted, count);
  stats.emitted += count;
  ++rounds_[index];

  // This level and all below have seen tokens that no longer stand.
  tokens_.resize(static_cast<size_t>(first));
  tokens_.insert(tokens_.end(), emitted.begin(), emitted.begin() + count);
  block = {};
  for (size_t i = index; i < levels_.size(); ++i) {
    levels_[i]->rollback(first + std::min(accepted, count));
  }

  if (level > 1) {  // hand up, each token with the distribution it now has: this level's
    Pending& above = pending_[index - 1];
    above.logits.insert(above.logits.end(), logits_.begin(), logits_.begin() + count * vocab_);
    above.statistics.insert(above.statistics.end(), statistics.begin(), statistics.begin() + count);
    above.count += count;
  }
  return count;
}

int64_t Chain::first_pending(int32_t level) const {
  int64_t first = static_cast<int64_t>(tokens_.size());
  for (size_t i = static_cast<size_t>(level - 1); i < pending_.size(); ++i)
    first -= pending_[i].count;
  return first;
}

polyspec::DrawParams Chain::draw_key(int32_t level, int64_t position, const Settings& settings) {
  polyspec::DrawParams draw;
  draw.seed.value = settings.seed;
  draw.position.value = position;
  draw.round.value = rounds_[static_cast<size_t>(level - 1)];
  draw.level = level;
  return draw;
}

std::vector<int64_t> generate_plainly(Level& target, const std::vector<int64_t>& prompt,
                                      const Settings& settings) {
  std::vector<int64_t> tokens = prompt;
  std::vector<float> logits(static_cast<size_t>(target.vocab_size()));
  polyspec::SampleParams p;
  p.batch = 1;
  p.vocab = target.vocab_size();
  p.logits = logits.data();
  p.sampling = settings.sampling;
  p.draw.seed.value = settings.seed;
  for (int64_t i = 0; i < settings.max_new_tokens; ++i) {
    const int64_t position = static_cast<int64_t>(tokens.size());
    target.forward(tokens, position, 1, logits.data());
    int64_t token = -1;
    float logprob = 0;
    int32_t status = 0;
    p.draw.position.value = position;
    p.tokens = &token;
    p.logprobs = &logprob;
    p.status = &status;
    const polyspec::Result result = polyspec::sample(p, polyspec::Stream::cpu(settings.executor));
    require_ok(result, status, 1, position);
    tokens.push_back(token);
    if (token == settings.eos) break;
  }
  return {tokens.begin() + static_cast<int64_t>(prompt.size()), tokens.end()};
}

void require_ok(const polyspec::Result& result, int32_t status, int32_t level, int64_t position) {
  if (!result.ok()) throw std::runtime_error(std::string("polyspec: ") + result.message);
  const int32_t errors = status & (polyspec::kStatusNotes - 1);
  if (errors == 0) return;
  char what[160];
  polyspec_status_string(errors, what, sizeof what);
  throw std::runtime_error("level " + std::to_string(level) + ", position " +
                           std::to_string(position) + ": " + what);
}
