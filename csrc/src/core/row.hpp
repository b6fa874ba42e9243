// Rows of logits in their three element types, read as float.
#pragma once

#include <type_traits>

#include "core/numeric.hpp"

namespace polyspec::POLYSPEC_CORE {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

POLYSPEC_FN float to_float(float value) { return value; }
POLYSPEC_FN float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
POLYSPEC_FN float to_float(Float16 value) {
  // The exponent is rebiased by a multiplication, which also normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 5.192296858534828e33f;  // 2^112
  const uint32_t special = (value.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | sign);
}

// One row of n logits with unit stride.
template <class T>
struct Row {
  const T* data;
  int64_t n;
  using Element = T;
  POLYSPEC_FN float operator[](int64_t i) const { return to_float(data[i]); }
};

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, float>      ? DType::kFloat32
                           : std::is_same_v<T, BFloat16> ? DType::kBFloat16
                                                         : DType::kFloat16;

// A row whose element type is known at run time only: the draft's side of a residual.
struct AnyRow {
  const void* data;
  int64_t n;
  DType dtype;
  using Element = float;  // for all that is known
  template <class T>
  POLYSPEC_FN Row<T> of_type() const {
    return {static_cast<const T*>(data), n};
  }
  POLYSPEC_FN float operator[](int64_t i) const {
    switch (dtype) {
      case DType::kFloat32:
        return static_cast<const float*>(data)[i];
      case DType::kBFloat16:
        return to_float(static_cast<const BFloat16*>(data)[i]);
      default:
        return to_float(static_cast<const Float16*>(data)[i]);
    }
  }
};

// A row that is known to have elements of type T.
template <class T>
POLYSPEC_FN Row<T> as_row(const Row<T>& row) {
  return row;
}
template <class T>
POLYSPEC_FN Row<T> as_row(const AnyRow& row) {
  return row.of_type<T>();
}

// Whether a row has elements of type T.
template <class T>
POLYSPEC_FN constexpr bool is_row(const Row<T>&) {
  return true;
}
template <class T>
POLYSPEC_FN bool is_row(const AnyRow& row) {
  return row.dtype == kDTypeOf<T>;
}

POLYSPEC_FN int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The row `offset` elements after `base`; offsets are 64-bit, tensors may exceed 2^32 elements.
template <class T>
POLYSPEC_FN Row<T> row_at(const void* base, int64_t offset, int64_t n) {
  return {static_cast<const T*>(base) + offset, n};
}
POLYSPEC_FN AnyRow any_row_at(const void* base, DType dtype, int64_t offset, int64_t n) {
  return {static_cast<const char*>(base) + offset * element_size(dtype), n, dtype};
}

}  // namespace polyspec::POLYSPEC_CORE
