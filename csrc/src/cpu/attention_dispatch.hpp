// Attention over a cache on the widest instruction set of this processor.
#pragma once

#include "cpu/attention_tables.hpp"

namespace polyspec::cpu {

// The copy for the instruction set in use.
const Attention& attention();

int64_t attention_workspace_bytes(const AttentionParams& params);
void attention(const AttentionParams& params, const Executor& executor);

}  // namespace polyspec::cpu
