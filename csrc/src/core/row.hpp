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

POLYSPEC_FN int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Elements of a type that is known at run time only.
struct AnyElements {
  const void* data;
  DType dtype;

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
  POLYSPEC_FN AnyElements operator+(int64_t n) const {
    return {static_cast<const char*>(data) + n * element_size(dtype), dtype};
  }
};
// Names rows of them: all rows on the CPU, where only loops over a range are compiled for each
// type.
struct Any {};

template <class T>
struct PointerTo {
  using Type = const T*;
};
template <>
struct PointerTo<Any> {
  using Type = AnyElements;
};
template <class T>
using Elements = typename PointerTo<T>::Type;

// One row of n logits with unit stride.
template <class T>
struct Row {
  Elements<T> data;
  int64_t n;
  using Element = T;
  POLYSPEC_FN float operator[](int64_t i) const { return to_float(data[i]); }
};

// Names rows of logits of type T of which some ids are forbidden.
template <class T>
struct Masked {
  T logit;
};
template <class T>
struct PlainType {
  using Type = T;
};
template <class T>
struct PlainType<Masked<T>> {
  using Type = T;
};
template <class T>
using Plain = typename PlainType<T>::Type;
template <class T>
constexpr bool kIsMasked = !std::is_same_v<T, Plain<T>>;

// -inf as a logit of type T.
template <class T>
POLYSPEC_FN T lowest_logit() {
  if constexpr (std::is_same_v<T, float>) return -kInfinity;
  if constexpr (std::is_same_v<T, BFloat16>) return {0xff80};
  if constexpr (std::is_same_v<T, Float16>) return {0xfc00};
}

// A row with forbidden ids read as -inf.
template <class T>
struct Row<Masked<T>> {
  Elements<T> data;
  const uint32_t* allowed;  // bit i % 32 of word i / 32; nullptr: all are allowed
  uint32_t first;           // of the row in `allowed`
  int32_t n;                // small, since functions take rows in registers
  using Element = T;
  POLYSPEC_FN float operator[](int64_t i) const {
    return (bits_at<1>(i) & 1) != 0 ? to_float(data[i]) : -kInfinity;
  }
  // The bits of kCount <= 32 ids from i on, from the lowest bit up; others may be set above them.
  template <int kCount>
  POLYSPEC_FN uint32_t bits_at(int64_t i) const {
    if (allowed == nullptr) return ~uint32_t{0};
    const uint32_t at = first + static_cast<uint32_t>(i);
    const int shift = static_cast<int>(at % 32);
    const uint32_t bits = allowed[at / 32] >> shift;
    return shift + kCount > 32 ? bits | allowed[at / 32 + 1] << (32 - shift) : bits;
  }
};

// n elements of a row, the first of them `begin`.
template <class T>
POLYSPEC_FN Row<T> part_of(const Row<T>& row, int64_t begin, int64_t n) {
  if constexpr (kIsMasked<T>) {
    return {row.data + begin, row.allowed, row.first + static_cast<uint32_t>(begin),
            static_cast<int32_t>(n)};
  } else {
    return {row.data + begin, n};
  }
}

template <class T>
constexpr DType kDTypeOf = std::is_same_v<Plain<T>, float>      ? DType::kFloat32
                           : std::is_same_v<Plain<T>, BFloat16> ? DType::kBFloat16
                                                                : DType::kFloat16;

// The elements from number `offset` on; offsets are 64-bit, tensors may exceed 2^32 elements.
template <class T>
POLYSPEC_FN Elements<T> elements_at(const void* base, DType dtype, int64_t offset) {
  if constexpr (std::is_same_v<T, Any>) {
    return AnyElements{base, dtype} + offset;
  } else {
    return static_cast<const T*>(base) + offset;
  }
}

// The row `offset` elements after `base`. `dtype` is read where T does not fix the type, `allowed`
// of masked rows only.
template <class T>
POLYSPEC_FN Row<T> row_at(const void* base, DType dtype, int64_t offset, int64_t n,
                          const int32_t* allowed = nullptr) {
  const Elements<Plain<T>> data = elements_at<Plain<T>>(base, dtype, offset);
  if constexpr (kIsMasked<T>) {
    return {data, reinterpret_cast<const uint32_t*>(allowed), 0, static_cast<int32_t>(n)};
  } else {
    return {data, n};
  }
}

// A draft's row, of any element type.
struct AnyRow {
  AnyElements data;
  int64_t n;
  using Element = Any;
  POLYSPEC_FN float operator[](int64_t i) const { return data[i]; }
};

// A row that is known to have elements of type T.
template <class T, class RowType>
POLYSPEC_FN Row<T> as_row(const RowType& row) {
  if constexpr (std::is_same_v<RowType, Row<T>>) {
    return row;
  } else {
    return row_at<T>(row.data.data, row.data.dtype, 0, row.n);
  }
}

// Whether a row has elements of type T.
template <class T, class RowType>
POLYSPEC_FN constexpr bool is_row(const RowType& row) {
  if constexpr (std::is_same_v<RowType, AnyRow>) {
    return row.data.dtype == kDTypeOf<T>;
  } else {
    return true;
  }
}

}  // namespace polyspec::POLYSPEC_CORE
