// Toy language models over a few tokens, small enough that every run of a chain of them can be
// enumerated.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "polyspec/verify.hpp"

namespace enumeration {

// A text is a string of token ids (char values 0 ... vocab-1), so that it can be a key of a map.
using Text = std::string;

// Logits that depend on the last two tokens. The token `vocab` means "before the beginning".
class ToyModel {
 public:
  // `distance`: how far the logits are from the logits of the model with the same `family` and
  // distance 0. One logit in `hole_one_in` is -inf (0: none), but never the first of a row.
  ToyModel(int64_t vocab, uint64_t family, uint64_t seed, double distance, int hole_one_in = 0)
      : vocab_(vocab), logits_((vocab + 1) * (vocab + 1) * vocab) {
    std::mt19937_64 shared(family), own(seed);
    for (size_t i = 0; i < logits_.size(); ++i) {
      logits_[i] = static_cast<float>(uniform(shared) + distance * uniform(own));
      const bool hole = hole_one_in > 0 && own() % hole_one_in == 0;
      if (hole && i % vocab_ != 0) logits_[i] = -std::numeric_limits<float>::infinity();
    }
  }

  int64_t vocab() const { return vocab_; }

  // The row [vocab] of logits for the token after `text`, with ids that may exceed this model's
  // vocabulary.
  const float* after(const Text& text) const {
    const size_t n = text.size();
    const int64_t last = n < 1 ? vocab_ : id(text[n - 1]);
    const int64_t before = n < 2 ? vocab_ : id(text[n - 2]);
    return &logits_[(before * (vocab_ + 1) + last) * vocab_];
  }

 private:
  static double uniform(std::mt19937_64& random) {  // in [-1.5, 1.5), the same on every platform
    return static_cast<double>(random() >> 11) * (3.0 / 9007199254740992.0) - 1.5;
  }
  int64_t id(char token) const { return token < vocab_ ? token : vocab_; }

  int64_t vocab_;
  std::vector<float> logits_;  // [(vocab+1) * (vocab+1), vocab]
};

// A chain of toy models with everything that steers it but its windows.
struct ToyChain {
  std::vector<ToyModel> levels;  // [0] is the target, the last the drafter
  polyspec::SamplingParams sampling;
  polyspec::Rule rule = polyspec::Rule::kToken;
  int eos = -1;                        // the token that ends a text, or -1
  bool deterministic_drafter = false;  // the drafter proposes its argmax, and hands no logits up
  bool hand_up_statistics =
      true;  // pass RowLaws as draft_statistics; else verify reduces the draft rows again
  std::vector<int32_t> draft_of;  // [vocab] draft id of each target id, -1: none; empty: identity

  int64_t vocab() const { return levels[0].vocab(); }
  int count() const { return static_cast<int>(levels.size()); }
};

}  // namespace enumeration
