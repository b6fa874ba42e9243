// Memory for the packed products: 64-byte aligned, and filled with values that no call may read.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace support {

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<uint8_t, Free>;

inline Aligned aligned(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  Aligned made(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
  std::memset(made.get(), 0x5a, size);
  return made;
}

}  // namespace support
