// The outputs of a tile, rounded to their element type.
#pragma once

#include "core/convert.hpp"

namespace polyspec::POLYSPEC_CORE {

// The outputs of a tile, of which the first `count` are written.
template <class T, int64_t kCount>
POLYSPEC_FN void write_outputs(const float (&values)[kCount], int64_t count, T* to) {
  T made[kCount];
  // Unrolled it would not become vectors.
#pragma GCC unroll 1
  for (int64_t i = 0; i < kCount; ++i) convert_output(values[i], made + i);
  if (count == kCount) {
    memcpy(to, made, sizeof(made));
  } else {
    memcpy(to, made, static_cast<size_t>(count) * sizeof(T));
  }
}

}  // namespace polyspec::POLYSPEC_CORE
