// The label before packed weights (PackedLayout, polyspec/types.hpp): layout and shape.
#pragma once

#include <cinttypes>
#include <cstring>
#include <type_traits>

#include "api/checks.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

struct PackedLabel {
  char mark[8] = {'p', 'o', 'l', 'y', 's', 'p', 'e', 'c'};
  int32_t layout = 0;  // PackedLayout
  int32_t dtype = 0;   // of dense weights, or of scales
  int32_t group = 0;   // inputs with one scale; 0 without groups
  int32_t unused = 0;
  int64_t outputs = 0, inputs = 0;
  int64_t reserved[3] = {};
};
static_assert(sizeof(PackedLabel) == kPackedLabelBytes, "a label has no padding");

inline void write_label(const PackedLabel& label, void* packed) {
  std::memcpy(packed, &label, sizeof label);
}

// Params of a call, with `packed` at the weights, which is all that the backends know of it.
template <class Params>
Params at_weights(Params params) {
  using Pointed = std::remove_pointer_t<decltype(params.packed)>;
  using Byte = std::conditional_t<std::is_const_v<Pointed>, const uint8_t, uint8_t>;
  params.packed = static_cast<Byte*>(params.packed) + kPackedLabelBytes;
  return params;
}

inline Result check_label(const PackedLabel& wanted, const void* packed) {
  PackedLabel found;
  std::memcpy(&found, packed, sizeof found);
  if (std::memcmp(&found, &wanted, sizeof found) == 0) return {};
  if (std::memcmp(found.mark, wanted.mark, sizeof found.mark) != 0)
    return invalid("packed: expected packed weights of this shape, given memory without a label");
  return invalid("packed: expected layout %" PRId32 ", dtype %" PRId32 ", group %" PRId32
                 ", [%" PRId64 ", %" PRId64 "], given layout %" PRId32 ", dtype %" PRId32
                 ", group %" PRId32 ", [%" PRId64 ", %" PRId64 "]",
                 wanted.layout, wanted.dtype, wanted.group, wanted.outputs, wanted.inputs,
                 found.layout, found.dtype, found.group, found.outputs, found.inputs);
}

// The result of *_packed_check for `bytes` bytes that begin with the label.
inline Result check_packed(const PackedLabel& wanted, const void* packed, int64_t bytes,
                           int64_t expected_bytes) {
  if (const Result given = check_given({{"packed", packed}}); !given.ok()) return given;
  if (bytes != expected_bytes)
    return invalid("packed: expected %" PRId64 " bytes, given %" PRId64, expected_bytes, bytes);
  if (const Result begin = check_aligned("packed", packed); !begin.ok()) return begin;
  return check_label(wanted, packed);
}

}  // namespace polyspec
