// Loops of a product over tokens and tiles of 16 outputs.
//
// A Pass has
//   kMostTokens             of one run;
//   tiles_at_once(tokens)   how many tiles a run goes through side by side;
//   run<M, N>(token, tile)  multiplies M tokens from `token` on with N tiles from `tile` on.
#pragma once

#include <cstdint>

#include "core/macros.hpp"

namespace polyspec::POLYSPEC_CORE {

// Tokens of a pass that run together: parts are of one size, as nearly as may be.
inline int64_t parts_of(int64_t tokens, int64_t most) { return (tokens + most - 1) / most; }
inline int64_t part_begin(int64_t tokens, int64_t parts, int64_t part) {
  return tokens * part / parts;
}

template <int M, class Pass>
void run_tokens(const Pass& pass, int64_t token, int64_t tokens, int64_t begin, int64_t end) {
  if constexpr (M > 0) {
    if (tokens < M) return run_tokens<M - 1>(pass, token, tokens, begin, end);
    constexpr int kTiles = Pass::tiles_at_once(M);
    if (end - begin < kTiles) {
      for (; begin < end; ++begin) pass.template run<M, 1>(token, begin);
      return;
    }
    // The last tiles may repeat earlier products: cheaper than tile by tile.
    for (; begin < end; begin += kTiles)
      pass.template run<M, kTiles>(token, begin + kTiles < end ? begin : end - kTiles);
  }
}

// `tokens` of them with tiles [begin, end), of which all tokens go through `cached` at a time while
// a cache holds them.
template <class Pass>
void run_pass(const Pass& pass, int64_t tokens, int64_t begin, int64_t end, int64_t cached) {
  constexpr int kMost = Pass::kMostTokens;
  const int64_t parts = parts_of(tokens, kMost);
  if (parts == 1) return run_tokens<kMost>(pass, 0, tokens, begin, end);
  for (; begin < end; begin += cached) {
    const int64_t cut = begin + cached < end ? begin + cached : end;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t token = part_begin(tokens, parts, part);
      run_tokens<kMost>(pass, token, part_begin(tokens, parts, part + 1) - token, begin, cut);
    }
  }
}

}  // namespace polyspec::POLYSPEC_CORE
