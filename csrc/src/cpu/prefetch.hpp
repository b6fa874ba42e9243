// Prefetches of a run over several tiles.
#pragma once

#include <cstdint>

#include "core/macros.hpp"

namespace polyspec::POLYSPEC_CORE {

// For every 64 bytes that are read at `from`: into the second cache the data of the next run at the
// same offset, `run_bytes` on; into the first the next data of this run. The processor's
// prefetching begins anew at each page and each tile. Arithmetic for several tokens, which takes as
// long as memory does, would wait meanwhile.
POLYSPEC_FN void prefetch(const uint8_t* from, int64_t run_bytes) {
  constexpr int64_t kSoon = 512;
  __builtin_prefetch(from + run_bytes, 0, 2);
  __builtin_prefetch(from + kSoon);
}

}  // namespace polyspec::POLYSPEC_CORE
