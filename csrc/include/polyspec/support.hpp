// The capabilities of this build and processor.
#pragma once

#include "polyspec/export.h"
#include "polyspec/types.hpp"

namespace polyspec {

enum class Op : int32_t {
  kSample = 0,
  kVerify = 1,
  kVerifyTree = 2,
  kDense = 3,      // dense_pack, dense_product
  kInt4 = 4,       // int4_round, int4_pack, int4_unpack, int4_product
  kAttention = 5,  // attention
  kCache = 6,      // all of kv_cache.hpp
  kSchedule = 7,   // all of round_state.hpp
};

// Whether the operator runs on the device with elements of this type: logits, activations, cached
// keys and values; for kDense of the weights too. kSchedule has none and takes any. CUDA counts
// where the build has its kernels and the current device runs them.
POLYSPEC_API bool supports(Op op, Stream::Device device, DType dtype);

// The instruction set that the operator's CPU loops use here, as POLYSPEC_CPU_ISA names it:
// "baseline", "dotprod", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16" or "amx"; nullptr
// for an invalid Op.
POLYSPEC_API const char* isa(Op op);

}  // namespace polyspec
