// Attention over a cache on the widest instruction set of this processor.
#pragma once

#include "polyspec/attention.hpp"

namespace polyspec::cpu {

void attention(const AttentionParams& params, const Executor& executor);

}  // namespace polyspec::cpu
