// Philox4x32-10, the counter-based generator of every draw (Salmon et al., SC 2011), and the keying
// of contract C3: a draw depends on (seed, position, level, round, node, purpose) and on nothing
// else.
//
// The use of each draw, with `position` of the call:
//   sample   the token: kSample at `position` and `node`, which distinguishes draws for one
//            position, for example of a tree's nodes of one depth;
//   verify   the test of draft token i (from 0): kAccept at position + i, which the block rule uses
//            for the prefix that ends with that token; the token after n accepted tokens,
//            correction or bonus: kEmit at position + n. Both with node 0. Try j of a correction:
//            kTry at position + n, its token with node 2 j and its test with node 2 j + 1;
//   verify_tree   at depth d, the test of the j-th child: kAccept at position + d and node j; the
//            token drawn from the row or its residual: kEmit at position + d and node 0; the tries
//            of the latter: kTry at position + d.
//            By the block rule the test of node i at depth d: kAccept at position + d and node i -
//            d, which is 0 in a chain.
// Draws that are not needed are left out.
// `round` is the caller's. In a ps.Chain each request counts the verifications of each level, and
// the drafter's turns, from 0; `level` counts from the target's 1; `position` counts the request's
// tokens, its prompt's included, from 0.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define POLYSPEC_HD __host__ __device__ __forceinline__
#else
#define POLYSPEC_HD inline __attribute__((always_inline))
#endif

namespace polyspec {

struct PhiloxBlock {
  uint32_t x[4];
};

// Ten rounds on one counter. Reference vectors are checked in csrc/tests/philox_test.cpp.
POLYSPEC_HD PhiloxBlock philox4x32_10(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * counter.x[0];
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * counter.x[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.x[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.x[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The use of a draw. Draft, accept and resample never share a draw.
enum class Purpose : uint32_t {
  kSample = 0,  // a token from the distribution itself, by `sample`
  kAccept = 1,  // the acceptance test of one draft token
  kEmit = 2,    // the correction or bonus token of a verification
  kTry = 3,     // a try to draw the correction by rejection, see verify.hpp
};

constexpr int64_t kDrawNodes = 1 << 14;  // nodes are in [0, 2^14)

// 64 uniform bits. level < 2^16, round < 2^32, node < 2^14: its bits are next to the purpose's, so
// that node 0 gives the draws without nodes. Levels begin at 1: the draw with level 0, round 0 and
// kSample at position b >= 1 is the seed of row b of a batch with one seed.
POLYSPEC_HD uint64_t draw_bits(uint64_t seed, int64_t position, int32_t level, int64_t round,
                               Purpose purpose, int64_t node = 0) {
  const uint64_t at = static_cast<uint64_t>(position);
  const PhiloxBlock counter{{static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32),
                             static_cast<uint32_t>(round),
                             static_cast<uint32_t>(level) << 16 | static_cast<uint32_t>(node) << 2 |
                                 static_cast<uint32_t>(purpose)}};
  const PhiloxBlock out =
      philox4x32_10(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return static_cast<uint64_t>(out.x[1]) << 32 | out.x[0];
}

// A double strictly inside (0, 1): 52 bits and a half, so neither end can be reached and `u < a`
// never accepts a token of probability 0.
POLYSPEC_HD double open_unit(uint64_t bits) {
  return (static_cast<double>(bits >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

}  // namespace polyspec
