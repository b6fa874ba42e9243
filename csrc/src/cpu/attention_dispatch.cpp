// Picks the widest instruction set this processor has, and spreads rows, heads of keys and queries
// over the caller's threads.
#include "cpu/attention_dispatch.hpp"

#include "cpu/isa.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

const Attention& choose() {
#ifdef POLYSPEC_X86
  if (isa_in_use() >= Isa::kAvx512) return kAttentionAvx512;
  if (isa_in_use() == Isa::kAvx2) return kAttentionAvx2;
#endif
  return kAttentionBaseline;
}

}  // namespace

const Attention& attention() {
  static const Attention& chosen = choose();
  return chosen;
}

void attention(const AttentionParams& params, const Executor& executor) {
  const Attention& chosen = attention();
  const int64_t groups = params.groups, queries = params.heads / groups * params.tokens;
  const int64_t parts = (queries + kAttentionQueries - 1) / kAttentionQueries;
  spread(executor, params.batch * groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const int64_t part = begin % parts, group = begin / parts;
      chosen.run(params, group / groups, group % groups, queries * part / parts,
                 queries * (part + 1) / parts);
    }
  });
}

}  // namespace polyspec::cpu
