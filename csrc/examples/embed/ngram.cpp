#include "ngram.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

Vocabulary::Vocabulary(const std::string& text) {
  bool seen[256] = {};
  for (const char c : text) seen[static_cast<unsigned char>(c)] = true;
  for (int b = 0; b < 256; ++b) {
    token_of_[b] = seen[b] ? static_cast<int64_t>(bytes_.size()) : -1;
    if (seen[b]) bytes_.push_back(static_cast<char>(b));
  }
  if (bytes_.empty()) throw std::runtime_error("the text is empty");
}

std::vector<int64_t> Vocabulary::encode(const std::string& text) const {
  std::vector<int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) {
    const int64_t token = token_of_[static_cast<unsigned char>(c)];
    if (token < 0) {
      char name[64];
      std::snprintf(name, sizeof name, "byte 0x%02x does not occur in the training text",
                    static_cast<unsigned>(static_cast<unsigned char>(c)));
      throw std::runtime_error(name);
    }
    tokens.push_back(token);
  }
  return tokens;
}

std::string Vocabulary::decode(const std::vector<int64_t>& tokens) const {
  std::string text;
  for (const int64_t token : tokens) text.push_back(bytes_.at(static_cast<size_t>(token)));
  return text;
}

namespace {

// The key of the context of `length` tokens that ends before `end`: a byte each, and the length on
// top.
uint64_t context_key(const int64_t* end, int length) {
  uint64_t key = static_cast<uint64_t>(length);
  for (int i = length; i > 0; --i) key = key << 8 | static_cast<uint64_t>(end[-i]);
  return key;
}

}  // namespace

NgramModel::NgramModel(int order, int64_t vocab, const std::vector<int64_t>& tokens)
    : order_(order), vocab_(vocab), statistics_(static_cast<size_t>(vocab)) {
  if (order < 1 || order > kMaxOrder) {
    throw std::invalid_argument("the order of an n-gram model must be 1 to " +
                                std::to_string(kMaxOrder) + ", got " + std::to_string(order));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint8_t token = static_cast<uint8_t>(tokens[i]);
    const int longest = static_cast<int>(std::min<size_t>(i, static_cast<size_t>(order - 1)));
    for (int length = 0; length <= longest; ++length) {
      Context& context = contexts_[context_key(tokens.data() + i, length)];
      ++context.total;
      auto at = std::find_if(context.counts.begin(), context.counts.end(),
                             [token](const Count& c) { return c.token == token; });
      if (at == context.counts.end()) at = context.counts.insert(at, Count{token, 0});
      ++at->count;
    }
  }
}

polyspec::Outcome NgramModel::decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept {
  text_.insert(text_.end(), tokens, tokens + count);
  logits_.resize(static_cast<size_t>(rows * vocab_));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t end = length() - rows + r + 1;
    row(text_.data() + end, end, logits_.data() + r * vocab_);
  }
  return {};
}

// Starts from the uniform distribution and mixes in ever longer contexts, as far as the training
// text has them.
void NgramModel::row(const int64_t* end, int64_t available, float* logits) {
  std::fill(statistics_.begin(), statistics_.end(), 1.0 / static_cast<double>(vocab_));
  for (int length = 0; length < order_ && length <= available; ++length) {
    const auto found = contexts_.find(context_key(end, length));
    if (found == contexts_.end()) break;
    const Context& context = found->second;
    const double distinct = static_cast<double>(context.counts.size());
    const double scale = 1.0 / (static_cast<double>(context.total) + distinct);
    for (double& p : statistics_) p *= distinct * scale;
    for (const Count& c : context.counts) statistics_[c.token] += c.count * scale;
  }
  for (int64_t x = 0; x < vocab_; ++x) {
    logits[x] = static_cast<float>(std::log(statistics_[static_cast<size_t>(x)]));
  }
}
