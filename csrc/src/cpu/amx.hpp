// The matrix registers of AMX: eight tiles of at most 16 rows of 64 bytes, which a thread sets up
// before it uses them. A product of two tiles has as many rows as its first; the second holds, row
// by row, the operand of one instruction for dot products: 4 bytes of each of 16 outputs.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.hpp"

namespace polyspec::POLYSPEC_CORE {

constexpr int64_t kMatrixRows = 16;
constexpr int64_t kMatrixRowBytes = 64;
constexpr int64_t kMatrixBytes = kMatrixRows * kMatrixRowBytes;

// While it lives, this thread's tiles have these rows and bytes of a row.
class Matrices {
 public:
  struct Shape {
    int64_t rows, bytes;
  };

  POLYSPEC_FN explicit Matrices(const Shape (&shapes)[8]) {
    Setup setup{};
    setup.palette = 1;
    for (int i = 0; i < 8; ++i) {
      setup.rows[i] = static_cast<uint8_t>(shapes[i].rows);
      setup.bytes[i] = static_cast<uint16_t>(shapes[i].bytes);
    }
    asm volatile("ldtilecfg %0" : : "m"(setup) : "memory");
  }
  POLYSPEC_FN ~Matrices() { asm volatile("tilerelease" : : : "memory"); }
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;

 private:
  struct Setup {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Setup) == 64, "as the instruction reads it");
};

// Tiles are named by constants. The compilers' intrinsics do not declare that they read memory.
template <int kTile>
POLYSPEC_FN void clear_matrix() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
POLYSPEC_FN void load_matrix(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
POLYSPEC_FN void store_matrix(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
// kSum += kRows * kColumns: whole numbers of 8 bits, with a sign and without.
template <int kSum, int kRows, int kColumns>
POLYSPEC_FN void add_whole_products() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
}
// The same in bfloat16, as polyspec/dense.hpp states it.
template <int kSum, int kRows, int kColumns>
POLYSPEC_FN void add_bfloat16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
}

}  // namespace polyspec::POLYSPEC_CORE
