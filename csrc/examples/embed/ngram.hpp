// Byte n-gram models: small replacements of language models, so that the example needs no weights.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "polyspec/engines/engine.hpp"

// The distinct bytes of a text, in ascending order; a token is an index into them.
class Vocabulary {
 public:
  // Throws std::runtime_error for an empty text.
  explicit Vocabulary(const std::string& text);

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  // Throws std::runtime_error naming a byte that the text does not have.
  std::vector<int64_t> encode(const std::string& text) const;
  std::string decode(const std::vector<int64_t>& tokens) const;

 private:
  std::string bytes_;      // [size()]
  int64_t token_of_[256];  // -1: not in the text
};

// A model of order n: the distribution of a token after the n - 1 tokens before it, with
// Witten-Bell smoothing,
//   p_n(x | h) = (c(h, x) + d(h) p_{n-1}(x | h')) / (c(h) + d(h)),   p_0 uniform,
// where c counts, d(h) is the number of distinct tokens seen after h, and h' is h without its first
// token (Witten and Bell 1991). Every token has probability, so logits = log p are finite.
class NgramModel final : public polyspec::Engine {
 public:
  static constexpr int kMaxOrder = 8;  // a context of 7 bytes and its length fill the 64-bit key

  // Counts `tokens` (each in [0, vocab), vocab <= 256). Throws std::invalid_argument for an order
  // outside [1, kMaxOrder].
  NgramModel(int order, int64_t vocab, const std::vector<int64_t>& tokens);

  int64_t vocab_size() const noexcept override { return vocab_; }
  int64_t max_length() const noexcept override { return INT32_MAX; }
  int64_t length() const noexcept override { return static_cast<int64_t>(text_.size()); }
  const float* logits() const noexcept override { return logits_.data(); }
  polyspec::Outcome decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept override;
  void truncate(int64_t length) noexcept override { text_.resize(static_cast<size_t>(length)); }

 private:
  struct Count {
    uint8_t token;
    uint32_t count;
  };
  struct Context {
    uint64_t total = 0;
    std::vector<Count> counts;  // one per distinct token
  };
  // The row after the `available` tokens before `end`.
  void row(const int64_t* end, int64_t available, float* logits);

  int order_;
  int64_t vocab_;
  std::unordered_map<uint64_t, Context> contexts_;  // of all lengths 0 ... order - 1
  std::vector<int64_t> text_;                       // read and not forgotten
  std::vector<float> logits_;                       // [rows, vocab] of the last decode
  std::vector<double> statistics_;                  // [vocab] scratch of `row`
};
