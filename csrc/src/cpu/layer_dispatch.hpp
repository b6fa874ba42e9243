// polyspec/layer.hpp on the widest instruction set of this processor.
#pragma once

#include "polyspec/layer.hpp"

namespace polyspec::cpu {

// Arguments are checked already (api/layer.cpp).
void rms_norm(const RmsNormParams& params, const Executor& executor);
void rotary(const RotaryParams& params, const Executor& executor);
void rotary_append(const RotaryAppendParams& params, const Executor& executor);
void gated(const GatedParams& params, const Executor& executor);

}  // namespace polyspec::cpu
