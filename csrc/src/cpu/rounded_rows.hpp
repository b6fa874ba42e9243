// Activations rounded to 8 bits, group by group, as products with packed whole numbers read them.
#pragma once

#include "core/row.hpp"

namespace polyspec::POLYSPEC_CORE {

// A token's activations of one group: x is near scale * values.
struct RoundedGroup {
  float scale;    // NaN where one of them is not finite
  float sum;      // of scale * values
  int32_t start;  // -offset times the sum of values: turns sums of q into sums of q - offset
};

constexpr int32_t kTiny = 0x0d800000;  // the bits of 2^-100: 127 / 2^-100 is far from overflow

// Writes `group` activations in chunks of `chunk`, each `stride` bytes after the last.
template <class T>
POLYSPEC_FN RoundedGroup round_group(const T* x, int64_t group, int32_t offset, int8_t* values,
                                     int64_t chunk, int64_t stride) {
  int32_t largest = 0;  // bits of the largest magnitude: the bits of a NaN are above all others
  for (int64_t k = 0; k < group; ++k) {
    const int32_t bits = bit_cast<int32_t>(to_float(x[k])) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const bool finite = largest < kOrderInfinity;
  if (!finite || largest < kTiny) {
    for (int64_t k = 0; k < group; k += chunk)
      memset(values + k / chunk * stride, 0, static_cast<size_t>(chunk));
    const float scale = finite ? 0.0f : kNan;
    return {scale, scale, 0};
  }
  const float scale = bit_cast<float>(largest) / 127.0f;
  const float inverse = 127.0f / bit_cast<float>(largest);
  int32_t sum = 0;
  for (int64_t begin = 0; begin < group; begin += chunk) {
    for (int64_t k = 0; k < chunk; ++k) {
      // Adding 1.5 * 2^23 rounds to an integer, ties to even, which the low bits then are.
      const float rounded = to_float(x[begin + k]) * inverse + 12582912.0f;
      const int8_t value = static_cast<int8_t>(bit_cast<int32_t>(rounded));
      values[k] = value;
      sum += value;
    }
    values += stride;
  }
  return {scale, scale * static_cast<float>(sum), -offset * sum};
}

// Rows [begin, end) of the `tokens` from `first` on, which a pass reads together.
struct RowsOfPass {
  int64_t first, tokens, begin, end;
};

// Rounded rows of a matrix in groups: values [inputs / kChunk, tokens, kChunk], and scales
// [inputs / group, tokens].
template <int64_t kChunk, class T>
void round_rows(const T* x, int64_t x_stride, const RowsOfPass& rows, int64_t inputs, int64_t group,
                int32_t offset, int8_t* values, RoundedGroup* scales) {
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    const T* const row = x + (rows.first + m) * x_stride;
    for (int64_t k = 0; k < inputs; k += group) {
      int8_t* to = values + k * rows.tokens + m * kChunk;
      scales[k / group * rows.tokens + m] =
          round_group(row + k, group, offset, to, kChunk, rows.tokens * kChunk);
    }
  }
}

// The same for a matrix with this element type.
template <int64_t kChunk>
void round_rows(const void* x, DType dtype, int64_t x_stride, const RowsOfPass& rows,
                int64_t inputs, int64_t group, int32_t offset, int8_t* values,
                RoundedGroup* scales) {
  const auto run = [&](const auto* from) {
    round_rows<kChunk>(from, x_stride, rows, inputs, group, offset, values, scales);
  };
  switch (dtype) {
    case DType::kFloat32:
      return run(static_cast<const float*>(x));
    case DType::kBFloat16:
      return run(static_cast<const BFloat16*>(x));
    case DType::kFloat16:
      return run(static_cast<const Float16*>(x));
  }
}

}  // namespace polyspec::POLYSPEC_CORE
