// Instructions of sm_80 that C++ has no words for: products of a warp on the tensor cores, and
// copies to shared memory that a thread does not wait for. csrc/tests/cuda_on_cpu has a body for
// each.
#pragma once

#include <type_traits>

#include "core/row.hpp"
#include "cuda/runtime.cuh"

namespace polyspec::cuda {

// sum += a b, of the warp's matrices of 16 x 16 and 16 x 8 in bfloat16 or float16, with sums in
// float32. Lane l has, of c = l % 4 and g = l / 4,
//   a   rows g and g + 8 of columns 2c and 2c + 1, then both of columns 2c + 8 and 2c + 9;
//   b   rows 2c and 2c + 1, then 2c + 8 and 2c + 9, of column g;
//   sum columns 2c and 2c + 1 of row g, then of row g + 8.
// A sum depends on its row of a and its column of b alone.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  stand_in::multiply(sum, a, b0, b1, [](uint16_t bits) { return core::to_float(T{bits}); });
#endif
}

// Loads four matrices of 8 rows of 16 bytes, 8 elements, from shared memory. Lane l gives the
// address of row l % 8 of matrix l / 8. It gets, of each matrix, elements 2c and 2c + 1 of row g;
// transposed: element g of rows 2c and 2c + 1.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
#ifdef __CUDACC__
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
#else
  stand_in::load_matrices<kTransposed>(to, row);
#endif
}

// (word & mask) | bits, in one instruction also where both are constants.
__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t mask, uint32_t bits) {
#ifdef __CUDACC__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
#else
  return (word & mask) | bits;
#endif
}

// Begins to copy 16 bytes to shared memory, both addresses multiples of 16. Of `bytes` below 16 the
// others become zero; of 0 `from` is not read.
__device__ __forceinline__ void copy_async(void* to, const void* from, unsigned bytes) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
#else
  stand_in::copy_async(to, from, bytes);
#endif
}

// The copies that this thread has begun since the last call form a batch, even an empty one.
__device__ __forceinline__ void end_batch() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  stand_in::end_batch();
#endif
}

// Waits until all but the latest `kLeft` batches of this thread are there, for this thread to see.
template <int kLeft>
__device__ __forceinline__ void wait_for_batches() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#else
  stand_in::wait_for_batches(kLeft);
#endif
}

}  // namespace polyspec::cuda
