// What the operators' argument checks share.
#pragma once

#include <cstdint>

#include "polyspec/status.hpp"

namespace polyspec {

inline Result invalid(const char* message) { return {Result::Code::kInvalidArgument, message}; }

// Of weights [outputs, inputs].
inline Result check_matrix(int64_t outputs, int64_t inputs) {
  if (outputs < 1 || outputs >= int64_t{1} << 31) return invalid("outputs must be in [1, 2^31)");
  if (inputs < 1 || inputs >= int64_t{1} << 31) return invalid("inputs must be in [1, 2^31)");
  return {};
}

// Whether memory of packed weights or a workspace begins where it has to.
inline bool aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 63) == 0;
}

}  // namespace polyspec
