// When spans of keys are spread over the threads in addition to the heads of keys
// (polyspec/attention.hpp).
#pragma once

#include "polyspec/attention.hpp"
#include "stable.hpp"

namespace bindings {

// Where there are more threads than heads of keys, `tasks`, and a text is long. A prompt's queries
// are tasks enough by themselves.
inline bool spreads_keys(int64_t length, int64_t tokens, int64_t tasks) {
  constexpr int64_t kFewTokens = 64;
  return length > polyspec::kAttentionSpan && tokens <= kFewTokens && tasks < threads();
}

}  // namespace bindings
