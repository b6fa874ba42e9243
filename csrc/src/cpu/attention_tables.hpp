// The entry points of attention over a cache, one set per instruction set (attention.cpp is
// compiled once for each).
#pragma once

#include "cpu/isa.hpp"
#include "polyspec/attention.hpp"

namespace polyspec::cpu {

// Queries of one row that read the same keys, and that a task takes at once.
constexpr int64_t kAttentionQueries = 32;

// Queries [first, last) of a row's queries over the keys of one group; query number i is token i %
// tokens of the group's head i / tokens.
struct AttentionQueries {
  int64_t row, group, first, last;
};

struct Attention {
  // Writes out.
  void (*run)(const AttentionParams& params, const AttentionQueries& queries);
  // Keeps the queries' sums over one span.
  void (*run_span)(const AttentionParams& params, const AttentionQueries& queries, int64_t span,
                   float* kept);
  // Writes the output from the kept sums of all spans, stored one after the other.
  void (*merge)(const AttentionParams& params, const AttentionQueries& queries, float* kept);
  const char* isa;
};

extern const Attention kAttentionBaseline, kAttentionAvx2, kAttentionAvx512;
constexpr Copy<Attention> kAttentionCopies[] = {
    {Isa::kBaseline, &kAttentionBaseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kAttentionAvx2},
    {Isa::kAvx512, &kAttentionAvx512},
#endif
};

}  // namespace polyspec::cpu
