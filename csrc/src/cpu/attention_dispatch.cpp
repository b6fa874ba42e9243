// Picks the last instruction set that this processor has, and spreads rows, heads of keys and
// queries over the caller's threads.
#include "cpu/attention_dispatch.hpp"

#include "core/layer_math.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {

const Attention& attention() {
  static const Attention& table = chosen(kAttentionCopies);
  return table;
}

int64_t attention_workspace_bytes(const AttentionParams& params) {
  const int64_t queries = params.batch * params.heads * params.tokens;
  return queries * core::attention_spans(params.length) * core::attention_kept(params.value_width) *
         static_cast<int64_t>(sizeof(float));
}

void attention(const AttentionParams& params, const Executor& executor) {
  const Attention& chosen = attention();
  const int64_t groups = params.groups, queries = params.heads / groups * params.tokens;
  const int64_t parts = (queries + kAttentionQueries - 1) / kAttentionQueries;
  const int64_t tasks = params.batch * groups * parts, spans = core::attention_spans(params.length);
  const auto queries_of = [&](int64_t task) {
    const int64_t part = task % parts, group = task / parts;
    return AttentionQueries{group / groups, group % groups, queries * part / parts,
                            queries * (part + 1) / parts};
  };
  if (params.workspace == nullptr || spans == 1) {
    return spread(executor, tasks, 1, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) chosen.run(params, queries_of(begin));
    });
  }
  const auto kept_of = [&](int64_t task, const AttentionQueries& of) {
    const int64_t before = task / parts * queries + of.first;
    return static_cast<float*>(params.workspace) +
           before * spans * core::attention_kept(params.value_width);
  };
  spread(executor, tasks * spans, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const AttentionQueries of = queries_of(begin / spans);
      const int64_t span = begin % spans,
                    each = (of.last - of.first) * core::attention_kept(params.value_width);
      chosen.run_span(params, of, span, kept_of(begin / spans, of) + span * each);
    }
  });
  spread(executor, tasks, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      const AttentionQueries of = queries_of(begin);
      chosen.merge(params, of, kept_of(begin, of));
    }
  });
}

}  // namespace polyspec::cpu
