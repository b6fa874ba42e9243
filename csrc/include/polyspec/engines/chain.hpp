// A chain of language models under polyspec's staged rule: engines in, tokens out.
//
// Level 1 is the target, level n the drafter. Each level but the last verifies the tokens that the
// level below emits: it accepts a prefix and adds one token, its correction or its bonus. The
// emitted tokens have this level's distribution on every path, so the level above uses *this*
// level's distribution as the proposal's q, for each of the emitted tokens. The text then has the
// target's distribution, exactly as if the target had sampled alone.
//
// The loop is over polyspec's sample, verify and Scheduler, on one thread: that of the caller.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "polyspec/engines/engine.hpp"
#include "polyspec/policy.hpp"
#include "polyspec/polyspec.h"
#include "polyspec/scheduler.hpp"
#include "polyspec/verify.hpp"

namespace polyspec {

struct ChainSettings {
  int64_t max_new_tokens = 256;
  std::vector<int64_t> eos;  // each of them ends the text, and is its last token
  int64_t tail = 0;          // unverified tokens that the drafter adds to level 2's; n >= 3
  // One distribution for all levels, or the chain is not lossless. Of its members the `value`
  // holds.
  SamplingParams sampling;
  // The drafter names its likeliest token and level n - 1 accepts it with the probability it gives
  // it, instead of min(1, p/q): as exact, and the rule of engines that keep no draft distributions.
  bool greedy_drafts = false;
  uint64_t seed = 0;
  Rule rule = Rule::kToken;
  Executor executor;  // the threads that sample and verify may use; serially by default
};

struct LevelStats {
  // Without passes over the prompt and unread tokens; a proposer's: the number of its calls.
  int64_t passes = 0;
  int64_t verifications = 0;
  int64_t proposed = 0;  // tokens verified
  int64_t accepted = 0;
  int64_t emitted = 0;    // tokens handed up; of level 1: the text
  int64_t caught_up = 0;  // tokens read that it had missed, of the prompt or by windows of 0
  double seconds = 0;     // of its steps and of that

  // Tokens that one verification yields, correction or bonus included.
  double mean_acceptance_length() const {
    return verifications == 0 ? 0.0
                              : static_cast<double>(emitted) / static_cast<double>(verifications);
  }
};

enum class Ended : int32_t {
  kLength = 0,   // max_new_tokens
  kEos = 1,      // the last token is one of `eos`
  kContext = 2,  // the smallest context is full
  kStopped = 3,  // the sink returned false
  kFailed = 4,   // see the Outcome
};

// Called with the tokens that the target has just added to the text; false stops.
using TokenSink = std::function<bool(const int64_t* tokens, int64_t count)>;

// Not to be used from two threads at once; its engines are in use while generate() runs.
class Chain {
 public:
  // engines: level 1, the target, first, not owned. An id that a level does not have is read by it
  // as id 0: the text keeps the target's distribution, independent of the ids that a draft reads.
  // proposer: the last level, instead of an engine, or nullptr; not owned. windows: one for each
  // level but the last; level i + 1 waits for windows[i] tokens, and 0 lets it decode alone. One
  // engine and no window is plain decoding. outcome() and every generate() report wrong arguments.
  Chain(std::vector<Engine*> engines, std::vector<int64_t> windows, Proposer* proposer = nullptr);

  const Outcome& outcome() const { return made_; }

  // Chooses the windows before every round of the target from now on; nullptr: they stay. Levels
  // below the target then read a prompt when they are first asked: the policy gets the cost of
  // speculation, and may not draft at all.
  void set_policy(std::unique_ptr<WindowPolicy> policy) { policy_ = std::move(policy); }

  // Writes the new tokens after `prompt` to *text, the EOS included. After a failure, for example
  // an exception of a sink or policy, *text has the tokens that the target had emitted until then,
  // and the chain can be used again.
  Outcome generate(const std::vector<int64_t>& prompt, const ChainSettings& settings,
                   std::vector<int64_t>* text, const TokenSink& sink = nullptr) noexcept;

  // Of the last generate():
  Ended ended() const { return ended_; }
  const std::vector<LevelStats>& stats() const { return stats_; }   // [n]
  double prompt_seconds() const { return prompt_seconds_; }         // before the first round
  const std::vector<int64_t>& windows() const { return windows_; }  // [n - 1] at its end

 private:
  using Clock = std::chrono::steady_clock;

  // Tokens that a level has emitted and the level above has still to verify; with a tail also
  // tokens for level 1 after the tokens of level 2. The ids are in tokens_.
  struct Pending {
    int64_t count = 0;
    int64_t vocab = 0;                // floats of a row: ids that level 2, 3, ... draws from
    int64_t capacity = 0;             // rows
    std::unique_ptr<float[]> logits;  // [capacity, vocab], the rows that tokens are drawn from
    std::vector<RowStatistics> statistics;  // [capacity]: spare the level above a pass
    std::vector<int64_t>
        rows;  // [capacity] a token's row: its index, or -1: a deterministic proposal

    void reserve(int64_t wanted);  // rows; keeps the existing rows
    void append(const float* row, int64_t ids);
    float* row(int64_t i) { return logits.get() + i * vocab; }
  };

  int32_t depth() const { return static_cast<int32_t>(std::max<size_t>(pending_.size(), 1)) + 1; }
  template <class Body>
  static Outcome guarded(const Body& body) noexcept;
  Outcome start(const std::vector<int64_t>& prompt, const ChainSettings& settings);
  Outcome run(const ChainSettings& settings, const TokenSink& sink);
  Outcome catch_up(int32_t level);
  Outcome decode(int32_t level, const int64_t* tokens, int64_t count, int64_t rows);
  Outcome read(int32_t level, int64_t rows);
  Outcome draft(const Step& step, const ChainSettings& settings, int64_t* drawn, bool* eos);
  Outcome verify(int32_t level, const ChainSettings& settings, int64_t* emitted, bool* eos);
  void choose_windows(const int64_t* told, int64_t count);
  int64_t first_pending(int32_t level) const;
  DrawParams draw_key(int32_t level, int64_t position, const ChainSettings& settings) const;
  static Outcome checked(const Result& result, int32_t status, int32_t level, int64_t position);

  std::vector<Engine*> engines_;
  Proposer* proposer_;
  Outcome made_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<WindowPolicy> policy_;
  std::vector<int64_t> windows_;
  std::vector<int64_t> vocab_;    // [engines] ids to draw from: at most as many as above
  std::vector<int64_t> tokens_;   // prompt, text, then the tokens pending for level 1, 2, ... n - 1
  std::vector<Pending> pending_;  // [n - 1] for level 1, 2, ... n - 1
  std::vector<int64_t> rounds_;   // [n] so that no two draws of a level share a key
  std::vector<LevelStats> stats_;
  std::vector<StepReport> steps_;  // of the round of the target under way
  double prompt_seconds_ = 0;
  Ended ended_ = Ended::kFailed;
  // Scratch of one verification, and of choose_windows.
  std::vector<int64_t> emitted_, next_windows_, readable_;
  std::vector<float> logprobs_;
  std::vector<RowStatistics> statistics_;
};

// -------------------------------------------------------------------------------------------------

inline Chain::Chain(std::vector<Engine*> engines, std::vector<int64_t> windows, Proposer* proposer)
    : engines_(std::move(engines)), proposer_(proposer), windows_(std::move(windows)) {
  const size_t levels = engines_.size() + (proposer_ != nullptr);
  if (engines_.empty() || windows_.size() + 1 != levels) {
    made_ = Outcome::failure(Outcome::Code::kInvalidArgument,
                             "a chain of n levels takes n - 1 windows: got %zu levels and %zu "
                             "windows",
                             levels, windows_.size());
    return;
  }
  for (const Engine* engine : engines_) {
    const int64_t vocab = engine == nullptr ? 0 : engine->vocab_size();
    if (vocab < 1 || vocab >= int64_t{1} << 31) {
      made_ = Outcome::failure(Outcome::Code::kInvalidArgument,
                               "engines: expected each with [1, 2^31) ids, given one with %lld",
                               static_cast<long long>(vocab));
      return;
    }
    vocab_.push_back(vocab_.empty() ? vocab : std::min(vocab_.back(), vocab));
  }
  pending_.resize(windows_.size());
  for (size_t i = 0; i + 1 < engines_.size(); ++i) pending_[i].vocab = vocab_[i + 1];
  try {
    scheduler_ = std::make_unique<Scheduler>(levels == 1 ? std::vector<int64_t>{0} : windows_);
  } catch (const std::exception& error) {
    made_ = Outcome::failure(Outcome::Code::kInvalidArgument, "%s", error.what());
  }
}

inline Outcome Chain::generate(const std::vector<int64_t>& prompt, const ChainSettings& settings,
                               std::vector<int64_t>* text, const TokenSink& sink) noexcept {
  ended_ = Ended::kFailed;
  if (text == nullptr)
    return Outcome::failure(Outcome::Code::kInvalidArgument, "text: expected a vector, given null");
  text->clear();
  if (!made_.ok()) return made_;
  Outcome outcome = guarded([&] { return start(prompt, settings); });
  if (outcome.ok()) {
    outcome = guarded([&] { return run(settings, sink); });
    const Outcome written = guarded([&] {
      const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(prompt.size());
      text->assign(begin, begin + scheduler_->committed());
      return Outcome();
    });
    if (outcome.ok()) outcome = written;
  }
  if (!outcome.ok()) ended_ = Ended::kFailed;
  return outcome;
}

// Turns exceptions of `body` into an outcome: no memory, or a policy or sink of the caller.
template <class Body>
Outcome Chain::guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return Outcome::failure(Outcome::Code::kEngine, "%s", error.what());
  } catch (...) {
    return Outcome::failure(Outcome::Code::kEngine, "an exception of unknown type");
  }
}

// Checks, forgets an earlier text and reads all of the prompt but its last token.
inline Outcome Chain::start(const std::vector<int64_t>& prompt, const ChainSettings& settings) {
  const int64_t length = static_cast<int64_t>(prompt.size());
  int64_t context = INT64_MAX;
  for (const Engine* engine : engines_) context = std::min(context, engine->max_length());
  if (length < 1 || length > context) {
    return Outcome::failure(length < 1 ? Outcome::Code::kInvalidArgument : Outcome::Code::kNoRoom,
                            "prompt: expected 1 to %lld tokens, as the smallest context holds, "
                            "given %lld",
                            static_cast<long long>(context), static_cast<long long>(length));
  }
  for (const int64_t token : prompt) {
    if (token < 0 || token >= vocab_.front()) {
      return Outcome::failure(
          Outcome::Code::kInvalidArgument, "prompt: expected ids in [0, %lld), given %lld",
          static_cast<long long>(vocab_.front()), static_cast<long long>(token));
    }
  }
  if (policy_ != nullptr && !windows_.empty() && policy_->levels() != depth()) {
    return Outcome::failure(Outcome::Code::kInvalidArgument,
                            "policy: expected one of %d levels, given one of %d", depth(),
                            policy_->levels());
  }
  // The last token is not read, so that one more token can follow a full context.
  const int64_t room = std::min(settings.max_new_tokens, context - length + 1);
  try {
    scheduler_->set_tail(settings.tail);
    scheduler_->start(room);
  } catch (const std::exception& error) {
    return Outcome::failure(Outcome::Code::kInvalidArgument, "%s", error.what());
  }
  ended_ = settings.max_new_tokens > room ? Ended::kContext : Ended::kLength;
  tokens_.reserve(static_cast<size_t>(length + std::min<int64_t>(room, 1 << 16)));
  tokens_ = prompt;
  for (Pending& pending : pending_) pending.count = 0;
  rounds_.assign(static_cast<size_t>(depth()), 0);
  stats_.assign(engines_.size() + (proposer_ != nullptr), {});
  steps_.clear();

  const auto began = Clock::now();
  for (Engine* engine : engines_) engine->truncate(0);
  for (size_t i = 0; i < engines_.size() && length > 1; ++i) {
    // A level of window 0 decodes alone, without drafts from below; no level with a policy.
    if (i > 0 && (policy_ != nullptr || windows_[i - 1] == 0)) break;
    const Outcome outcome = decode(static_cast<int32_t>(i) + 1, prompt.data(), length - 1, 0);
    if (!outcome.ok()) {
      return Outcome::failure(outcome.code, "level %zu, prompt: %.200s", i + 1, outcome.message);
    }
  }
  prompt_seconds_ = std::chrono::duration<double>(Clock::now() - began).count();
  choose_windows(prompt.data(), length);
  return {};
}

inline Outcome Chain::run(const ChainSettings& settings, const TokenSink& sink) {
  const Ended without_eos = ended_;
  while (true) {
    const Step step = scheduler_->next();
    if (step.kind == Step::Kind::kDone) return {};
    if (policy_ != nullptr) {
      const Outcome outcome = catch_up(step.level);
      if (!outcome.ok()) return outcome;
    }
    LevelStats& stats = stats_[static_cast<size_t>(step.level - 1)];
    const bool drafts = step.kind == Step::Kind::kDraft;
    const int64_t accepted_before = stats.accepted;
    const auto began = Clock::now();
    int64_t emitted = 0;
    bool eos = false;
    const Outcome outcome = drafts ? draft(step, settings, &emitted, &eos)
                                   : verify(step.level, settings, &emitted, &eos);
    if (!outcome.ok()) return outcome;
    scheduler_->report(step.level, emitted, eos);
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    stats.seconds += seconds;
    if (policy_ != nullptr) {
      const int64_t width = drafts ? emitted : step.count;
      // Policies estimate the acceptance of the level below, which a tail's tokens do not show.
      const int64_t tokens = drafts ? emitted : step.count - step.of_tail;
      const int64_t accepted = std::min(stats.accepted - accepted_before, tokens);
      steps_.push_back({step.level, tokens, accepted, width, 1, seconds, false});
    }
    if (step.level != 1) continue;
    const int64_t* added = tokens_.data() + tokens_.size() - emitted;
    ended_ = eos ? Ended::kEos : without_eos;
    if (sink && !sink(added, emitted)) {
      ended_ = Ended::kStopped;
      return {};
    }
    choose_windows(added, emitted);
  }
}

// Before a round of the target, when nothing is pending; `told`: the prompt, or the tokens that the
// last round committed.
inline void Chain::choose_windows(const int64_t* told, int64_t count) {
  if (policy_ == nullptr || windows_.empty()) return;
  RoundReport report;
  report.begins = steps_.empty();
  report.steps = steps_.data();
  report.num_steps = static_cast<int64_t>(steps_.size());
  report.tokens = told;
  report.num_tokens = count;
  next_windows_.resize(windows_.size());
  policy_->next(report, next_windows_.data());
  if (next_windows_ != windows_) {
    scheduler_->set_windows(next_windows_);
    windows_ = next_windows_;
  }
  steps_.clear();
}

// Has level `level` read its unread tokens of the committed text, but the last, in a separate pass:
// the policy gets its time separately from the time of the next step. The few tokens that a level
// has not read after a round are read in the next step.
inline Outcome Chain::catch_up(int32_t level) {
  constexpr int64_t kFew = 8;
  const size_t index = static_cast<size_t>(level - 1);
  if (index >= engines_.size()) return {};
  Engine* engine = engines_[index];
  const int64_t read = engine->length();
  const int64_t missed = first_pending(1) - 1 - read;
  if (missed < kFew) return {};
  const auto began = Clock::now();
  const Outcome outcome = decode(level, tokens_.data() + read, missed, 0);
  if (!outcome.ok()) {
    return Outcome::failure(outcome.code, "level %d, position %lld: %.200s", level,
                            static_cast<long long>(read), outcome.message);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
  stats_[index].caught_up += missed;
  stats_[index].seconds += seconds;
  steps_.push_back({level, 0, 0, 0, 1, seconds, true});
  return {};
}

// Has level `level` read tokens as the ids that it has.
inline Outcome Chain::decode(int32_t level, const int64_t* tokens, int64_t count, int64_t rows) {
  Engine* engine = engines_[static_cast<size_t>(level - 1)];
  const int64_t vocab = engine->vocab_size();
  if (vocab < vocab_.front()) {
    readable_.assign(tokens, tokens + count);
    for (int64_t& token : readable_) token = token < vocab ? token : 0;
    tokens = readable_.data();
  }
  return engine->decode(tokens, count, rows);
}

// Has level `level` read the text up to its end, and keep the logits of the last `rows` tokens.
inline Outcome Chain::read(int32_t level, int64_t rows) {
  Engine* engine = engines_[static_cast<size_t>(level - 1)];
  const int64_t end = static_cast<int64_t>(tokens_.size());
  if (engine->length() > end - rows) engine->truncate(end - rows);
  ++stats_[static_cast<size_t>(level - 1)].passes;
  const int64_t read = engine->length();
  const Outcome outcome = decode(level, tokens_.data() + read, end - read, rows);
  if (outcome.ok()) return outcome;
  return Outcome::failure(outcome.code, "level %d, position %lld: %.200s", level,
                          static_cast<long long>(end), outcome.message);
}

// The last level proposes up to `step.count` tokens for the level above, or of a tail for level 1;
// fewer if one of them ends the text.
inline Outcome Chain::draft(const Step& step, const ChainSettings& settings, int64_t* drawn,
                            bool* eos) {
  const int32_t level = scheduler_->levels();
  LevelStats& stats = stats_.back();
  Pending& block = step.of_tail > 0 ? pending_.front() : pending_.back();
  const auto ends = [&settings](int64_t token) {
    return std::find(settings.eos.begin(), settings.eos.end(), token) != settings.eos.end();
  };
  block.reserve(block.count + step.count);
  if (proposer_ != nullptr) {
    const int64_t length = static_cast<int64_t>(tokens_.size());
    emitted_.resize(static_cast<size_t>(step.count));
    const int64_t found = std::min(
        proposer_->propose(tokens_.data(), length, step.count, emitted_.data()), step.count);
    ++stats.passes;
    for (; *drawn < found && !*eos; ++*drawn) {
      const int64_t token = emitted_[static_cast<size_t>(*drawn)];
      if (token < 0 || token >= vocab_.back()) break;  // the levels above do not have it
      block.rows[static_cast<size_t>(block.count++)] = -1;
      tokens_.push_back(token);
      *eos = ends(token);
    }
  }
  for (; proposer_ == nullptr && *drawn < step.count && !*eos; ++*drawn) {
    const Outcome outcome = read(level, 1);
    if (!outcome.ok()) return outcome;
    const size_t at = static_cast<size_t>(block.count);
    const int64_t position = static_cast<int64_t>(tokens_.size());
    block.append(engines_.back()->logits(), vocab_.back());

    int64_t token = -1;
    float logprob = 0;
    int32_t status = 0;
    SampleParams p;
    p.batch = 1;
    p.vocab = block.vocab;
    p.logits = block.row(block.count - 1);
    p.sampling = settings.sampling;
    if (settings.greedy_drafts) p.sampling.temperature = {};
    if (settings.greedy_drafts) p.sampling.temperature.value = 0;
    p.draw = draw_key(level, position, settings);
    p.tokens = &token;
    p.logprobs = &logprob;
    p.status = &status;
    p.statistics = &block.statistics[at];
    const Result result = sample(p, Stream::cpu(settings.executor));
    const Outcome sampled = checked(result, status, level, position);
    if (!sampled.ok()) return sampled;
    if (settings.greedy_drafts) block.rows[at] = -1;
    tokens_.push_back(token);
    *eos = ends(token);
  }
  ++rounds_.back();
  stats.emitted += *drawn;
  return {};
}

// Level `level` verifies all its pending tokens and hands up the accepted tokens with one more.
inline Outcome Chain::verify(int32_t level, const ChainSettings& settings, int64_t* emitted,
                             bool* eos) {
  const size_t index = static_cast<size_t>(level - 1);
  Pending none;
  Pending& block = pending_.empty() ? none : pending_[index];
  LevelStats& stats = stats_[index];
  const int64_t first = first_pending(level);
  const int64_t rows = block.count + 1;
  const Outcome outcome = read(level, rows);  // one pass over the whole block
  if (!outcome.ok()) return outcome;

  emitted_.resize(static_cast<size_t>(rows));
  logprobs_.resize(emitted_.size());
  statistics_.resize(emitted_.size());
  int64_t accepted = 0, ended = 0;
  int32_t status = 0;
  VerifyParams p;
  p.batch = 1;
  p.draft_len = block.count;
  p.vocab = vocab_[index];
  p.target_logits = engines_[index]->logits();
  p.target_stride[0] = rows * engines_[index]->vocab_size();
  p.target_stride[1] = engines_[index]->vocab_size();
  p.draft_tokens = tokens_.data() + first;
  p.draft_tokens_stride = block.count;
  if (block.count > 0 && block.vocab > 0) {  // q: the rows of the level that drew each token
    p.draft_vocab = block.vocab;
    p.draft_logits = block.logits.get();
    p.draft_stride[1] = block.vocab;
    p.draft_statistics = block.statistics.data();
    p.draft_rows = block.rows.data();
    p.draft_rows_stride = block.count;
    p.num_draft_rows = block.count;
  }
  p.sampling = settings.sampling;
  p.draw = draw_key(level, first, settings);
  p.rule = settings.rule;
  p.tokens = emitted_.data();
  p.num_accepted = &accepted;
  p.logprobs = logprobs_.data();
  p.status = &status;
  p.statistics = statistics_.data();
  p.cut.eos = settings.eos.data();
  p.cut.eos_count = static_cast<int64_t>(settings.eos.size());
  p.cut.num_emitted = emitted;
  p.cut.ended = &ended;
  const Result result = polyspec::verify(p, Stream::cpu(settings.executor));
  const Outcome verified = checked(result, status, level, first + accepted);
  if (!verified.ok()) return verified;
  *eos = ended != 0;

  ++stats.verifications;
  stats.proposed += block.count;
  stats.accepted += accepted;
  stats.emitted += *emitted;
  ++rounds_[index];

  // This level and all below have read tokens that were rejected.
  tokens_.resize(static_cast<size_t>(first));
  tokens_.insert(tokens_.end(), emitted_.begin(), emitted_.begin() + *emitted);
  block.count = 0;
  for (size_t i = index; i < engines_.size(); ++i) {
    if (engines_[i]->length() > first + accepted) engines_[i]->truncate(first + accepted);
  }

  if (level > 1) {  // hand up, each token with the distribution it now has: this level's
    Pending& above = pending_[index - 1];
    above.reserve(above.count + *emitted);
    for (int64_t i = 0; i < *emitted; ++i) {
      above.statistics[static_cast<size_t>(above.count)] = statistics_[static_cast<size_t>(i)];
      above.append(engines_[index]->logits() + i * engines_[index]->vocab_size(), vocab_[index]);
    }
  }
  return {};
}

// Index in tokens_ of the first token that `level` has to verify.
inline int64_t Chain::first_pending(int32_t level) const {
  int64_t first = static_cast<int64_t>(tokens_.size());
  for (size_t i = static_cast<size_t>(level - 1); i < pending_.size(); ++i) {
    first -= pending_[i].count;
  }
  return first;
}

inline DrawParams Chain::draw_key(int32_t level, int64_t position,
                                  const ChainSettings& settings) const {
  DrawParams draw;
  draw.seed.value = settings.seed;
  draw.position.value = position;
  draw.round.value = rounds_[static_cast<size_t>(level - 1)];
  draw.level = level;
  return draw;
}

inline Outcome Chain::checked(const Result& result, int32_t status, int32_t level,
                              int64_t position) {
  const int32_t errors = status & (kStatusNotes - 1);
  if (result.ok() && errors == 0) return {};
  if (!result.ok()) {
    return Outcome::failure(Outcome::Code::kInvalidArgument, "level %d: %s", level, result.message);
  }
  char what[160];
  polyspec_status_string(errors, what, sizeof what);
  return Outcome::failure(Outcome::Code::kNoDistribution, "level %d, position %lld: %s", level,
                          static_cast<long long>(position), what);
}

inline void Chain::Pending::reserve(int64_t wanted) {
  if (wanted <= capacity) return;
  const int64_t more = std::max(wanted, 2 * capacity);
  if (more > PTRDIFF_MAX / 4 / std::max<int64_t>(vocab, 4)) throw std::bad_alloc();
  std::unique_ptr<float[]> grown(new float[static_cast<size_t>(more * vocab)]);
  std::copy_n(logits.get(), count * vocab, grown.get());
  logits = std::move(grown);
  statistics.resize(static_cast<size_t>(more));
  rows.resize(static_cast<size_t>(more));
  capacity = more;
}

// A row of `ids` logits; larger ids have no probability.
inline void Chain::Pending::append(const float* row_of_ids, int64_t ids) {
  std::copy_n(row_of_ids, ids, row(count));
  std::fill_n(row(count) + ids, vocab - ids, -std::numeric_limits<float>::infinity());
  rows[static_cast<size_t>(count)] = count;
  ++count;
}

}  // namespace polyspec
