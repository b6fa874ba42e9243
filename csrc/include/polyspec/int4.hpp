// polyspec::int4_product: a few rows of activations times a weight matrix of 4-bit numbers.
//
// Weights are w[n, k] = (q[n, k] - 8) * scale[n, k / group] + zero[n, k / group] with q in [0, 16):
// the form of torch's `_weight_int4pack_mm`. A draft or middle level that is a 4-bit copy of its
// target reads a quarter of the bytes of bfloat16, and a verification of several tokens reads them
// once for all.
#pragma once

#include "polyspec/export.h"
#include "polyspec/layer.hpp"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

constexpr int64_t kInt4Outputs = 16;  // outputs of a tile
constexpr int64_t kInt4Tokens = 64;   // tokens of a pass over the weights

// A matrix [outputs, inputs] in groups along the inputs.
//
// Packed, it is a row of tiles of 16 outputs (the last one filled up with zeros), each tile a row
// of groups, each group
//   16 scales, 16 zeros                in scale_dtype, by output;
//   group / 8 blocks of 64 bytes      for each output 4 bytes; the low half of byte j is q at input
//                                      j of the block, the high half at input 4 + j.
// So a tile is read from its first byte to its last, and a block unpacks into two vectors for an
// instruction for dot products of bytes: four adjacent inputs of an output. A label precedes the
// tiles, PackedLayout::kInt4.
struct Int4Shape {
  int64_t outputs = 0;                   // n >= 1
  int64_t inputs = 0;                    // k, a positive multiple of group
  int32_t group = 128;                   // 32, 64, 128 or 256
  DType scale_dtype = DType::kBFloat16;  // kFloat32 or kBFloat16
};

// Bytes of the packed matrix; -1 for a shape that is none.
POLYSPEC_API int64_t int4_packed_bytes(const Int4Shape& shape);

struct Int4RoundParams {
  Int4Shape shape;                    // scales and zeros are exact in its scale_dtype
  DType dtype = DType::kFloat32;      // of the weights
  const void* weights = nullptr;      // [n, k], unit stride along k
  int64_t stride = 0;                 // elements from one output to the next
  const float* importance = nullptr;  // [k] >= 0, of the squared errors; nullptr: all count alike
  uint8_t* values = nullptr;          // [n, k]
  float* scales = nullptr;            // [n, k / group]
  float* zeros = nullptr;             // [n, k / group]
};

// Rounds a matrix to the nearest 4-bit numbers. Each group takes the one of a few ranges with the
// least squared error: the range of all its weights, and narrower ranges, since cutting the largest
// weights may cost less than coarser steps for all. Weights that are all alike have the scale 1.
// The same, bit for bit, on every processor. Writes values, scales and zeros; kInvalidArgument
// where a weight is not finite, or too large for its range to be.
POLYSPEC_API Result int4_round(const Int4RoundParams& params, Stream stream = Stream::cpu());

struct Int4PackParams {
  Int4Shape shape;
  const uint8_t* values = nullptr;  // [n, k] q, each in [0, 16)
  const float* scales = nullptr;    // [n, k / group]; rounded to scale_dtype
  const float* zeros = nullptr;     // [n, k / group]; rounded to scale_dtype
  uint8_t* packed = nullptr;        // out; int4_packed_bytes(shape), 64-byte aligned
};

// kInvalidArgument where a value is not in [0, 16).
POLYSPEC_API Result int4_pack(const Int4PackParams& params);

// The other way round.
struct Int4UnpackParams {
  Int4Shape shape;
  const uint8_t* packed = nullptr;
  uint8_t* values = nullptr;  // [n, k] out
  float* scales = nullptr;    // [n, k / group] out
  float* zeros = nullptr;     // [n, k / group] out
};
POLYSPEC_API Result int4_unpack(const Int4UnpackParams& params);

// Whether `bytes` bytes are a packed matrix of this shape and layout, by their label: for weights
// out of a file. The numbers themselves are not looked at.
POLYSPEC_API Result int4_packed_check(const Int4Shape& shape, const void* packed, int64_t bytes);

// y = x W^T with rounded activations. The activations of a token are rounded to whole numbers of
// -127 to 127 times a scale, group by group, where the scale is the largest magnitude among them
// over 127 (0 where that is below 2^-100); products of whole numbers are summed exactly, and the
// groups' sums, times both scales, in float32 in ascending order. How far y is from the product of
// x and the dequantised weights in exact arithmetic, with a_k the largest |x| of k's group:
//   |y - exact| <= (1/254 + 2^-22) sum_k a_k |w_nk|
//                  + (k / group + 1) 2^-22 sum_k a_k (|q_nk - 8| |scale| + |zero|)
//                  + (rounding of y to dtype)
// where all a_k are 0 or at least 2^-100 and no sum overflows.
//
// y is the same, bit for bit, on every processor, with any number of threads and any other rows in
// the call: in a pass of one token and in one of many. A row of x that holds an
// infinity or a NaN gives a row of NaN, and leaves the others alone.
struct Int4ProductParams {
  Int4Shape shape;
  int64_t tokens = 0;               // m >= 0
  DType dtype = DType::kFloat32;    // of x and y
  const void* x = nullptr;          // [m, k], unit stride along k
  int64_t x_stride = 0;             // elements from one token to the next, >= k
  const uint8_t* packed = nullptr;  // of int4_pack, 64-byte aligned; huge pages are read faster
  // [m, n], unit stride along n; apart from all that is read and from the workspace
  void* y = nullptr;
  int64_t y_stride = 0;       // elements from one token to the next, >= n
  void* workspace = nullptr;  // int4_workspace_bytes(shape, tokens), 64-byte aligned
  // On CUDA and in bfloat16, with the bits of rms_norm before the product, and of a sum after it.
  // The norm is computed in the launch of the product for up to 8 tokens on sm_90 and later, if a
  // multiprocessor has room for them, else in a launch before it. No kernel of the same CUDA graph
  // writes its weight.
  const void* norm = nullptr;      // [k], weight of a norm of x, 16-byte aligned; nullptr: none
  float epsilon = 0.0f;            // > 0, of the norm
  void* normed = nullptr;          // [m, k], memory for the norm; x_stride is k then
  const void* residual = nullptr;  // [m, n] of y's stride, added to the rounded y; nullptr: none
};

// Memory that a call on the CPU needs for its activations.
POLYSPEC_API int64_t int4_workspace_bytes(const Int4Shape& shape, int64_t tokens);

// Runs on the CPU, on the stream's threads, or on CUDA, of which the rest is below.
POLYSPEC_API Result int4_product(const Int4ProductParams& params, Stream stream = Stream::cpu());

// ---- On CUDA, sm_80 and later ----
//
// A matrix is packed on the device, by one launch, for products there: in another layout than on
// the CPU and without a label, since the host cannot read it. scale_dtype is kBFloat16.
//
// Packed, it is a row of tiles of 32 outputs (an even number, the last filled up with zeros), each
// tile a row of groups, each group, with g in [0, 8) and c in [0, 4),
//   8 vectors of 16 bytes              16 times the scale, and the zero, of outputs g, g + 8, g +
//                                      16 and g + 24;
//   group / 32 chunks of 32 vectors    vector 4g + c has inputs 8c to 8c + 7 of these outputs in
//                                      words of 32 bits: outputs g and g + 8 with the first and
//                                      the last four inputs, then g + 16 and g + 24.
// A word has two numbers for each of four pairs (output, two inputs): pair i is at bit 4i + 3 for
// the even input, and at bit 4i + 19, from 32 on again from 0, for the odd one; of the pairs the
// output changes first.

// Bytes of the packed matrix there; -1 for a shape that is none.
POLYSPEC_API int64_t int4_packed_bytes(const Int4Shape& shape, Stream::Device device);

// All memory of `params` lives where the call runs. On CUDA the lower four bits of values count,
// none is refused, and `packed` is 16-byte aligned.
POLYSPEC_API Result int4_pack(const Int4PackParams& params, Stream stream);

// int4_product on CUDA is one launch, or two of 33 to 64 tokens on sm_90 and later, and takes no
// workspace. No kernel of the same CUDA graph writes `packed`, which is read before earlier kernels
// of a graph have ended. x and y are bfloat16 or float16, x and its stride multiples of 16 bytes.
// Weights are read once for up to 32 tokens; more form several blocks, which read the weights at
// the same time or from L2. Neither weights nor activations are rounded; sums are float32 on the
// tensor cores:
//   |y - exact| <= (group + 2 k / group + 12) 2^-22 sum_k |x_k| (56 |scale| + |zero|)
//                  + (rounding of y to dtype)
// where no sum overflows. A row is the same, bit for bit, with any other rows in the call; devices
// with tensor cores that add in the same way give the same bits. An infinity or a NaN in a row of x
// leaves the other rows alone.

// The same launches, with the gated activation of layer.hpp: y is [m, n / 2], of outputs 0 to n / 2
// - 1 as gates and the others as ups, with the bits of int4_product and gated. n is a multiple of
// 64. On CUDA and in bfloat16 only.
POLYSPEC_API Result int4_gated_product(const Int4ProductParams& params, Stream stream);

// With rotary_append of layer.hpp, of the product's rows, with the bits of int4_product and it. No
// launch more for up to 32 tokens on sm_90 and later, if the product has none either, heads are 64,
// 128, 256 or 512 wide, and they have no norms; else one. On CUDA and in bfloat16 only.
struct Int4RotaryParams {
  Int4ProductParams product;  // without a residual; y is memory for the product, its rows adjacent
  RotaryAppendParams append;  // of y; its x is ignored
};
POLYSPEC_API Result int4_rotary_product(const Int4RotaryParams& params, Stream stream);

}  // namespace polyspec
