// Picks the last instruction set that this processor has, and spreads tokens over the caller's
// threads.
#include "cpu/layer_dispatch.hpp"

#include "cpu/layer_tables.hpp"
#include "cpu/spread.hpp"

namespace polyspec::cpu {
namespace {

// Of a task, which should outlast its hand-over to another thread: some 5 us.
constexpr int64_t kValuesPerTask = int64_t{1} << 14;

int64_t tokens_per_task(int64_t width) { return std::max<int64_t>(1, kValuesPerTask / width); }

int64_t features(const RotaryParams& params) {
  return (params.heads + 2 * params.groups) * params.width;
}

const Layer& layer() {
  static const Layer& table = chosen(kLayerCopies);
  return table;
}

}  // namespace

void rms_norm(const RmsNormParams& params, const Executor& executor) {
  spread(executor, params.tokens, tokens_per_task(params.width),
         [&](int64_t begin, int64_t end) { layer().rms_norm(params, begin, end); });
}

void rotary(const RotaryParams& params, const Executor& executor) {
  spread(executor, params.batch * params.tokens, tokens_per_task(features(params)),
         [&](int64_t begin, int64_t end) { layer().rotary(params, begin, end); });
}

void rotary_append(const RotaryAppendParams& params, const Executor& executor) {
  spread(executor, params.turn.batch * params.turn.tokens, tokens_per_task(features(params.turn)),
         [&](int64_t begin, int64_t end) { layer().rotary_append(params, begin, end); });
}

void gated(const GatedParams& params, const Executor& executor) {
  if (params.width == 0) return;
  spread(executor, params.tokens, tokens_per_task(2 * params.width),
         [&](int64_t begin, int64_t end) { layer().gated(params, begin, end); });
}

}  // namespace polyspec::cpu
