// Copies of sm_90 that one thread begins for all and barriers in shared memory count.
// csrc/tests/cuda_on_cpu has a body for each.
#pragma once

#include <cstdint>

#include "cuda/runtime.cuh"

namespace polyspec::cuda {

// In shared memory, 8-byte aligned. Its phases have the parities 0, 1, 0, ...; each ends when its
// copy is there.
using CopyBarrier = uint64_t;

// By one thread; before others or copies use the barrier come begin_barriers and a barrier of all.
__device__ __forceinline__ void make_barrier(CopyBarrier* barrier) {
#ifdef __CUDACC__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
               : "memory");
#else
  stand_in::make_barrier(barrier);
#endif
}

// By the thread that initialised them.
__device__ __forceinline__ void begin_barriers() {
#ifdef __CUDACC__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// By one thread: begins to copy to this CTA's shared memory, and the phase of the barrier, which
// ends when all bytes have arrived. Addresses and `bytes` are multiples of 16. Other threads'
// earlier reads at `to` come before a barrier with this thread.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, unsigned bytes,
                                          CopyBarrier* barrier) {
#ifdef __CUDACC__
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes), "r"(at)
      : "memory");
#else
  stand_in::copy_bulk(to, from, bytes, barrier);
#endif
}

// Waits for the end of the phase of this parity: the barrier is in it or in the next one.
__device__ __forceinline__ void wait_for_phase(CopyBarrier* barrier, int parity) {
#ifdef __CUDACC__
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n"
      "}" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))),
      "r"(parity)
      : "memory");
#else
  stand_in::wait_for_phase(barrier, parity);
#endif
}

}  // namespace polyspec::cuda
