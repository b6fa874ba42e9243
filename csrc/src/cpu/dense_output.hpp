// A tile's sums of a token as outputs of a dense product.
#pragma once

#include "cpu/convert.hpp"
#include "polyspec/dense.hpp"

namespace polyspec::POLYSPEC_CORE {

template <class T>
POLYSPEC_FN void write_output(const DenseProductParams& params, float (&values)[kDenseOutputs],
                              int64_t token, int64_t tile) {
  const int64_t begin = tile * kDenseOutputs, rest = params.shape.outputs - begin;
  const int64_t count = rest < kDenseOutputs ? rest : kDenseOutputs;
  if (params.bias != nullptr) {
    const T* bias = static_cast<const T*>(params.bias) + begin;
    if (count == kDenseOutputs) {
      for (int64_t i = 0; i < kDenseOutputs; ++i) values[i] += to_float(bias[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] += to_float(bias[i]);
    }
  }
  write_outputs(values, count, static_cast<T*>(params.y) + token * params.y_stride + begin);
}

}  // namespace polyspec::POLYSPEC_CORE
