// The entry points of polyspec/layer.hpp, one set per instruction set (layer.cpp is compiled once
// for each).
#pragma once

#include "cpu/isa.hpp"
#include "polyspec/layer.hpp"

namespace polyspec::cpu {

struct Layer {
  // Tokens [begin, end); of rotary positions the tokens of all rows, numbered one row after
  // another.
  void (*rms_norm)(const RmsNormParams& params, int64_t begin, int64_t end);
  void (*rotary)(const RotaryParams& params, int64_t begin, int64_t end);
  void (*rotary_append)(const RotaryAppendParams& params, int64_t begin, int64_t end);
  void (*gated)(const GatedParams& params, int64_t begin, int64_t end);
};

extern const Layer kLayerBaseline, kLayerAvx2, kLayerAvx512;
constexpr Copy<Layer> kLayerCopies[] = {
    {Isa::kBaseline, &kLayerBaseline},
#ifdef POLYSPEC_X86
    {Isa::kAvx2, &kLayerAvx2},
    {Isa::kAvx512, &kLayerAvx512},
#endif
};

}  // namespace polyspec::cpu
