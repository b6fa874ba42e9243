// Prompt lookup: the tokens that followed the previous occurrence of the text's last tokens (Saxena
// 2023). The last level of a chain over texts that repeat themselves: code under edit, summaries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "polyspec/engines/engine.hpp"

namespace polyspec {

class PromptLookup final : public Proposer {
 public:
  // Looks for the last `longest` tokens, then for fewer, down to `shortest`; the latest match wins.
  explicit PromptLookup(int64_t longest = 3, int64_t shortest = 1)
      : longest_(longest), shortest_(std::max<int64_t>(shortest, 1)) {}

  int64_t propose(const int64_t* text, int64_t length, int64_t most,
                  int64_t* tokens) noexcept override {
    for (int64_t n = std::min(longest_, length - 1); n >= shortest_; --n) {
      const int64_t* const key = text + length - n;
      for (const int64_t* at = key - 1; at >= text; --at) {
        if (!std::equal(at, at + n, key)) continue;
        const int64_t count = std::min(most, text + length - (at + n));
        std::copy(at + n, at + n + count, tokens);
        return count;
      }
    }
    return 0;
  }

 private:
  int64_t longest_, shortest_;
};

}  // namespace polyspec
