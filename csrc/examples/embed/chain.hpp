// A chain of language models under polyspec's staged rule: the loop to copy into your own program.
//
// Level 1 is the target, level n the drafter. Each level but the last verifies what the one below
// hands up: it accepts a prefix and adds one token, its correction or its bonus. What it emits has
// its own distribution whatever path led there, so the level above takes *this* level's
// distribution as the proposal's q, for every one of those tokens. The text then has the target's
// distribution, exactly as if the target had sampled alone.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "polyspec/policy.hpp"
#include "polyspec/scheduler.hpp"
#include "polyspec/verify.hpp"

// A language model. Replace it by yours: one forward pass over the tokens it has not seen yet.
class Level {
 public:
  virtual ~Level() = default;
  virtual int64_t vocab_size() const = 0;

  // Writes `rows` rows of logits [rows, vocab_size()]: row r is the distribution of the token after
  // tokens[0 ... first + r). first + rows - 1 <= tokens.size(). A model with a key/value cache
  // feeds the tokens that its cache lacks.
  virtual void forward(const std::vector<int64_t>& tokens, int64_t first, int64_t rows,
                       float* logits) = 0;

  // The tokens from index `length` on have been withdrawn: a cache keeps at most that many.
  virtual void rollback(int64_t length) { (void)length; }
};

struct Settings {
  int64_t max_new_tokens = 256;
  int64_t eos = -1;  // the token that ends the text; -1: none
  int64_t tail = 0;  // tokens that the drafter adds, unverified, to those that the target verifies
  polyspec::SamplingParams
      sampling;  // one distribution for all levels, or the chain is not lossless
  uint64_t seed = 0;
  polyspec::Rule rule = polyspec::Rule::kToken;
  polyspec::Executor executor;  // the threads that sample and verify may use; serially by default
};

struct LevelStats {
  int64_t forward_passes = 0;  // the drafter: one per token; the others: one per verification
  int64_t verifications = 0;
  int64_t proposed = 0;  // tokens verified
  int64_t accepted = 0;
  int64_t emitted = 0;  // tokens handed up (level 1: the text)

  // Tokens that one verification yields, correction or bonus included.
  double mean_acceptance_length() const {
    return verifications == 0 ? 0.0
                              : static_cast<double>(emitted) / static_cast<double>(verifications);
  }
};

class Chain {
 public:
  // levels: [n], n >= 2, level 1 first, not owned; windows: [n - 1], windows[i] tokens is what
  // level i + 1 waits for. Throws std::invalid_argument for other counts or unequal vocabularies.
  Chain(std::vector<Level*> levels, std::vector<int64_t> windows);

  // Chooses the windows before every round of the target from now on; nullptr: they stay.
  void set_policy(std::unique_ptr<polyspec::WindowPolicy> policy) { policy_ = std::move(policy); }

  // The new tokens after `prompt`, the EOS included. Throws std::runtime_error when a row of logits
  // has no distribution or a parameter is out of range, naming level and position; and
  // std::invalid_argument for a negative tail, or one of a chain of two levels.
  std::vector<int64_t> generate(const std::vector<int64_t>& prompt, const Settings& settings);

  const std::vector<LevelStats>& stats() const { return stats_; }  // [n] of the last generate()

 private:
  // What a level has emitted and the level above has still to verify, or level 1, behind what level
  // 2 has emitted, of a tail. The tokens themselves stand in tokens_.
  struct Pending {
    int64_t count = 0;
    std::vector<float> logits;  // [count, v]: the rows the tokens were drawn from, not copies of q
    std::vector<polyspec::RowStatistics>
        statistics;  // [count]: spares the level above a pass over those rows
  };

  int64_t first_pending(
      int32_t level) const;  // index in tokens_ of the first token `level` has to verify
  int64_t draft(const polyspec::Step& step, const Settings& settings, bool* eos);
  int64_t verify(int32_t level, const Settings& settings, bool* eos);
  void choose_windows(const std::vector<int64_t>& told);
  polyspec::DrawParams draw_key(int32_t level, int64_t position, const Settings& settings);

  std::vector<Level*> levels_;
  polyspec::Scheduler scheduler_;
  int64_t vocab_;
  std::vector<int64_t> tokens_;   // prompt, text, then what is pending for level 1, 2, ... n - 1
  std::vector<Pending> pending_;  // [n - 1] for level 1, 2, ... n - 1
  std::vector<int64_t> rounds_;   // [n] so that no two draws of a level share a key
  std::vector<LevelStats> stats_;
  std::unique_ptr<polyspec::WindowPolicy> policy_;
  std::vector<polyspec::StepReport> steps_;  // of the round of the target under way
  std::vector<float> logits_;                // scratch: the rows of the level at work
};

// The same text without a chain, one forward pass of `target` per token.
std::vector<int64_t> generate_plainly(Level& target, const std::vector<int64_t>& prompt,
                                      const Settings& settings);

// Throws std::runtime_error unless the call and the request went well. `position`: of the row that
// failed.
void require_ok(const polyspec::Result& result, int32_t status, int32_t level, int64_t position);
