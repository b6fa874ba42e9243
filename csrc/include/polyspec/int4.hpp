// polyspec::int4_product: a few rows of activations times a weight matrix of 4-bit numbers, on the
// CPU.
//
// Weights are w[n, k] = (q[n, k] - 8) * scale[n, k / group] + zero[n, k / group] with q in [0, 16):
// the form of torch's `_weight_int4pack_mm`. A draft or middle level that is a 4-bit copy of its
// target reads a quarter of the bytes of bfloat16, and a verification of several tokens unpacks
// every weight once for all of them.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

constexpr int64_t kInt4Outputs = 16;  // outputs of a tile
constexpr int64_t kInt4Tokens = 16;   // tokens for which a weight is unpacked once

// A matrix [outputs, inputs] in groups along the inputs.
//
// Packed, it is a row of tiles of 16 outputs (the last one filled up with zeros), each of them a
// row of groups, each of those
//   16 scales, 16 zeros                in scale_dtype, by output;
//   group / 8 blocks of 64 bytes      little-endian words of 32 bits, one per output; the nibble at
//                                      bit 4 j is q at input 2 j of the block for j < 4, and at
//                                      input 2 (j - 4) + 1 for j >= 4.
// So a tile is read from its first byte to its last, and one word holds what both a dot product of
// pairs (bits 4 j and 16 + 4 j) and a multiplication of single lanes want.
struct Int4Shape {
  int64_t outputs = 0;                   // n >= 1
  int64_t inputs = 0;                    // k, a positive multiple of group
  int32_t group = 128;                   // 32, 64, 128 or 256
  DType scale_dtype = DType::kBFloat16;  // kFloat32 or kBFloat16
};

// Bytes of the packed matrix; -1 for a shape that is none.
POLYSPEC_API int64_t int4_packed_bytes(const Int4Shape& shape);

struct Int4PackParams {
  Int4Shape shape;
  uint8_t* values = nullptr;  // [n, k] q, each in [0, 16)
  float* scales = nullptr;    // [n, k / group]; rounded to scale_dtype
  float* zeros = nullptr;     // [n, k / group]; rounded to scale_dtype
  uint8_t* packed = nullptr;  // int4_packed_bytes(shape), 64-byte aligned
};

// Reads values, scales and zeros, and writes packed. kInvalidArgument where a value is not in
// [0, 16).
POLYSPEC_API Result int4_pack(const Int4PackParams& params);
// The other way round.
POLYSPEC_API Result int4_unpack(const Int4PackParams& params);

// y = x W^T. How far y is from the product of the dequantised weights in exact arithmetic, with
// S = sum_k |x_k| (|q_nk - 8| |scale| + |zero|):
//   |y - exact| <= (u + (k + group) 2^-23) S + (rounding of y to dtype),
// u = 0 where activations are multiplied in float32, and 2^-8 where they are rounded to bfloat16
// first, which is so with AVX512-BF16 unless they are bfloat16 already (int4_rounds_activations).
//
// A row of y does not depend on the rows beside it, nor on their number or on the threads: it is
// the same, bit for bit, in a pass of one token and in one of sixteen.
struct Int4ProductParams {
  Int4Shape shape;
  int64_t tokens = 0;               // m >= 0
  DType dtype = DType::kFloat32;    // of x and y
  const void* x = nullptr;          // [m, k], unit stride along k
  int64_t x_stride = 0;             // elements from one token to the next
  const uint8_t* packed = nullptr;  // 64-byte aligned
  void* y = nullptr;                // [m, n], unit stride along n
  int64_t y_stride = 0;             // elements from one token to the next
  void* workspace = nullptr;        // int4_workspace_bytes(shape, tokens), 64-byte aligned
};

// Memory that a call needs for its activations.
POLYSPEC_API int64_t int4_workspace_bytes(const Int4Shape& shape, int64_t tokens);

// Runs on the CPU, on the stream's threads; kUnsupported for a CUDA stream.
POLYSPEC_API Result int4_product(const Int4ProductParams& params, Stream stream = Stream::cpu());

// Whether float32 activations are rounded to bfloat16 on this processor.
POLYSPEC_API bool int4_rounds_activations();

// Name of the instruction set in use: "baseline", "avx2", "avx512" or "avx512bf16".
POLYSPEC_API const char* int4_isa();

}  // namespace polyspec
