// Philox4x32-10 against Random123's known answers, and the keying of contract C3.
#include "polyspec/philox.hpp"

#include <set>

#include "support/check.hpp"

namespace {

using polyspec::draw_bits;
using polyspec::open_unit;
using polyspec::PhiloxBlock;
using polyspec::Purpose;

// The three philox4x32 10 lines of kat_vectors in the Random123 distribution (Salmon et al., SC
// 2011).
void test_known_answers() {
  struct Vector {
    uint32_t counter[4], key[2], answer[4];
  };
  const Vector vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Vector& v : vectors) {
    const PhiloxBlock counter{{v.counter[0], v.counter[1], v.counter[2], v.counter[3]}};
    const PhiloxBlock out = polyspec::philox4x32_10(counter, v.key[0], v.key[1]);
    for (int i = 0; i < 4; ++i) CHECK_EQ(v.answer[i], out.x[i]);
  }
}

// Philox is a bijection of the counter for each key, so distinct counters cannot give the same
// block; a coincidence of the 64 bits kept of it, among a few thousand draws, has probability
// 1e-12.
void test_keying() {
  std::set<uint64_t> seen;
  size_t drawn = 0;
  const uint64_t seeds[] = {0, 1, 1ull << 32, ~0ull};
  const int64_t positions[] = {0, 1, 2, 1ll << 31, 1ll << 32, (1ll << 32) + 1, INT64_MAX};
  const int32_t levels[] = {1, 2, 3, 255, 256, 65535};
  const int64_t rounds[] = {0, 1, 2, 65536, (1ll << 32) - 1};
  const Purpose purposes[] = {Purpose::kSample, Purpose::kAccept, Purpose::kEmit};
  const int64_t nodes[] = {0, 1, 2, 3, 4, 255, polyspec::kDrawNodes - 1};
  for (uint64_t seed : seeds)
    for (int64_t position : positions)
      for (int32_t level : levels)
        for (int64_t round : rounds)
          for (Purpose purpose : purposes) {
            for (int64_t node : nodes)
              seen.insert(draw_bits(seed, position, level, round, purpose, node));
            drawn += sizeof nodes / sizeof nodes[0];
            CHECK_EQ(draw_bits(seed, position, level, round, purpose),
                     draw_bits(seed, position, level, round, purpose, 0));
          }
  CHECK_EQ(drawn, seen.size());
  CHECK_EQ(draw_bits(5, 6, 7, 8, Purpose::kEmit), draw_bits(5, 6, 7, 8, Purpose::kEmit));
  // All zero but the purpose kSample and level 0 is the first known answer: the word order is
  // fixed.
  CHECK_EQ(0xe169c58d6627e8d5ull, draw_bits(0, 0, 0, 0, Purpose::kSample));
  // And of all 1 bits the second: the last node with the fourth purpose, which is unused.
  CHECK_EQ(0x41c83b0e408f276dull, draw_bits(~0ull, -1, 65535, (1ll << 32) - 1,
                                            static_cast<Purpose>(3), polyspec::kDrawNodes - 1));
}

void test_open_unit() {
  CHECK_ABOVE(0.0, open_unit(0));
  CHECK_BELOW(1.0, open_unit(~0ull));
  CHECK_EQ(0.5 / 4503599627370496.0, open_unit(0));
  CHECK_EQ(1.0 - 0.5 / 4503599627370496.0, open_unit(~0ull));
  CHECK_BELOW(open_unit(1ull << 12), open_unit((1ull << 12) - 1));
  CHECK_BELOW(0.5, open_unit((1ull << 63) - 1));
  CHECK_ABOVE(0.5, open_unit(1ull << 63));
}

}  // namespace

int main() {
  test_known_answers();
  test_keying();
  test_open_unit();
  return 0;
}
