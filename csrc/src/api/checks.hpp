// Helpers of the operators' argument checks.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

struct AttentionParams;
struct DenseShape;
struct Int4Shape;
struct RotaryAppendParams;

Result check_shape(const DenseShape& shape);
Result check_shape(const Int4Shape& shape);
Result check_shape(const AttentionParams& params);  // all but the tensors
Result check(const RotaryAppendParams& params);

#if defined(__GNUC__) || defined(__clang__)
__attribute__((format(printf, 1, 2)))
#endif
inline Result invalid(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const Result out = Result::failure(Result::Code::kInvalidArgument, format, arguments);
  va_end(arguments);
  return out;
}

// Of a whole number, or of an enum by its number.
template <class T>
Result expected(const char* name, const char* what, T given) {
  return invalid("%s: expected %s, given %lld", name, what, static_cast<long long>(given));
}

// The first of the pointers that is null, where `needed`.
struct Named {
  const char* name;
  const void* pointer;
  bool needed = true;
};
inline Result check_given(std::initializer_list<Named> all) {
  for (const Named& one : all) {
    if (one.needed && one.pointer == nullptr)
      return invalid("%s: expected a pointer, given null", one.name);
  }
  return {};
}

inline Result check_dtype(const char* name, DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return {};
  return expected(name, "float32 (0), bfloat16 (1) or float16 (2)", static_cast<int>(dtype));
}

inline Result on_cpu_only(const char* operation) {
  Result out = invalid("%s: expected the CPU, given a CUDA stream", operation);
  out.code = Result::Code::kUnsupported;
  return out;
}

// Whether a * b <= limit, of numbers >= 0.
inline bool product_fits(int64_t a, int64_t b,
                         int64_t limit = std::numeric_limits<int64_t>::max()) {
  return a == 0 || b == 0 || a <= limit / b;
}

// Checks the sizes of one tensor or workspace, by `names`; sizes below 1 count as 1. No address
// space has more elements than this limit. Below it, counts of bytes of a few tensors fit int64.
inline Result check_sizes(const char* names, std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMost = int64_t{1} << 56;
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    const int64_t counted = size > 1 ? size : 1;
    if (!product_fits(elements, counted, kMost)) {
      return invalid("%s: expected at most 2^56 elements in all, given %lld times %lld or more",
                     names, static_cast<long long>(elements), static_cast<long long>(counted));
    }
    elements *= counted;
  }
  return {};
}

// Sets strides that were left at 0 to contiguous strides. `inner`: the size of the dimension inside
// each of them, the last with unit stride.
inline void fill_strides(std::initializer_list<int64_t> inner, int64_t* strides) {
  uint64_t next = 1;
  for (size_t i = inner.size(); i-- > 0;) {
    const uint64_t beside = next * static_cast<uint64_t>(inner.begin()[i]);
    if (strides[i] == 0) strides[i] = static_cast<int64_t>(beside);
    next = static_cast<uint64_t>(strides[i]);
  }
}

// Of weights [outputs, inputs].
inline Result check_matrix(int64_t outputs, int64_t inputs) {
  if (outputs < 1 || outputs >= int64_t{1} << 31) return expected("outputs", "[1, 2^31)", outputs);
  if (inputs < 1 || inputs >= int64_t{1} << 31) return expected("inputs", "[1, 2^31)", inputs);
  return {};
}

// Where memory of packed weights or a workspace begins.
inline Result check_aligned(const char* name, const void* pointer, uintptr_t bytes = 64) {
  const uintptr_t beyond = reinterpret_cast<uintptr_t>(pointer) % bytes;
  if (beyond == 0) return {};
  return invalid("%s: expected a multiple of %llu bytes, given an address %llu behind one", name,
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(beyond));
}

// Rows of `width` elements, unit stride along them. A stride below the width, or 0 where none was
// set, has rows that overlap; one row has no use for its stride.
struct Rows {
  const void* data;
  int64_t count, width, stride;  // in elements
  int64_t element_bytes;

  bool apart() const {
    return count < 2 || (stride >= width && product_fits(count, stride, kLimit / element_bytes));
  }
  // Where `apart`.
  int64_t bytes() const {
    return count == 0 ? 0 : ((count - 1) * (count < 2 ? 0 : stride) + width) * element_bytes;
  }
  // Whether the bytes from the first element to the last meet so many others.
  bool meets(const void* other, int64_t other_bytes) const {
    if (other == nullptr || other_bytes == 0 || count == 0) return false;
    return behind(other) >= 0 ? behind(other) < bytes() : -behind(other) < other_bytes;
  }
  // Whether elements meet. (Rows of one stride may lie between each other, as columns of a matrix.)
  bool meets(const Rows& other) const {
    if (!meets(other.data, other.bytes())) return false;
    if (count < 2 || other.count < 2 || stride != other.stride) return true;
    const int64_t row = stride * element_bytes;
    const int64_t after = (behind(other.data) % row + row) % row;
    return after < width * element_bytes || row - after < other.width * element_bytes;
  }

 private:
  int64_t behind(const void* other) const {
    return reinterpret_cast<intptr_t>(other) - reinterpret_cast<intptr_t>(data);
  }

  static constexpr int64_t kLimit = std::numeric_limits<int64_t>::max() / 2;
};

inline Rows memory(const void* data, int64_t bytes) { return {data, 1, bytes, 0, 1}; }

struct NamedRows {
  const char* name;
  Rows rows;
};
inline Result check_apart(const char* name, const Rows& rows,
                          std::initializer_list<NamedRows> others) {
  for (const NamedRows& other : others) {
    if (rows.meets(other.rows))
      return invalid("%s: expected memory apart from all else, given some of %s", name, other.name);
  }
  return {};
}

}  // namespace polyspec
