// The entry points of attention over a cache, one set per instruction set (attention.cpp is
// compiled once for each).
#pragma once

#include "polyspec/attention.hpp"

namespace polyspec::cpu {

// Queries of one row that read the same keys, and that a task takes at once.
constexpr int64_t kAttentionQueries = 32;

struct Attention {
  // Queries [first, last) of those that read the keys of one group; query number i is that of token
  // i % tokens of the group's head i / tokens.
  void (*run)(const AttentionParams& params, int64_t row, int64_t group, int64_t first,
              int64_t last);
  const char* isa;
};

extern const Attention kAttentionBaseline;
#ifdef POLYSPEC_X86
extern const Attention kAttentionAvx2;
extern const Attention kAttentionAvx512;
#endif

}  // namespace polyspec::cpu
