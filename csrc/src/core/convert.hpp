// float32 rounded to the other element types: to the nearest, ties to even.
#pragma once

#include "core/row.hpp"

namespace polyspec::POLYSPEC_CORE {

POLYSPEC_FN BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
POLYSPEC_FN Float16 to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // below the normal numbers: adding 1/2 aligns the bits
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

POLYSPEC_FN void convert(float value, float* to) { *to = value; }
POLYSPEC_FN void convert(float value, BFloat16* to) { *to = to_bfloat16(value); }
POLYSPEC_FN void convert(float value, Float16* to) { *to = to_float16(value); }

// Every NaN becomes one and the same: its sign and payload depend on the processor.
template <class T>
POLYSPEC_FN void convert_output(float value, T* to) {
  convert(value == value ? value : kNan, to);
}
// Without branches: loops of it become vectors.
POLYSPEC_FN void convert_output(float value, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
}

}  // namespace polyspec::POLYSPEC_CORE
