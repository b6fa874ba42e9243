// polyspec::dense_product: a few rows of activations times a weight matrix, both in float32 or both
// in bfloat16, on the CPU; on CUDA in bfloat16.
//
// A verification reads the target's weights once for all its tokens, so that a block should cost as
// much as one token. It does until the arithmetic takes longer than the memory.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

constexpr int64_t kDenseOutputs = 16;  // outputs of a tile

// A matrix [outputs, inputs].
//
// Packed, it is a row of tiles of 16 outputs (the last one filled up with zeros), each of them a
// row of blocks of 64 bytes: in float32 one input of each output; in bfloat16 inputs 2 i and 2 i +
// 1 of each output, where an odd last input is paired with a zero. A label precedes them,
// PackedLayout::kDense.
struct DenseShape {
  int64_t outputs = 0;            // n >= 1
  int64_t inputs = 0;             // k >= 1
  DType dtype = DType::kFloat32;  // kFloat32 or kBFloat16: of weights, bias, x and y
};

// Bytes of the packed matrix; -1 for an invalid shape, or more bytes than int64 holds.
POLYSPEC_API int64_t dense_packed_bytes(const DenseShape& shape);

struct DensePackParams {
  DenseShape shape;
  const void* weights = nullptr;  // [n, k], unit stride along k
  int64_t weights_stride = 0;     // elements from one output to the next, >= k
  void* packed = nullptr;         // dense_packed_bytes(shape), 64-byte aligned
};

POLYSPEC_API Result dense_pack(const DensePackParams& params);

// Whether `bytes` bytes are a packed matrix of this shape and layout, by their label: for weights
// out of a file. The numbers themselves are not looked at.
POLYSPEC_API Result dense_packed_check(const DenseShape& shape, const void* packed, int64_t bytes);

// y = x W^T + b. Each output is one chain of fused multiply-adds in float32,
//   for k = 0, 1, ...: sum = fma(x[k], w[k], sum)                                    in float32,
//   for i = 0, 1, ...: sum = fma(x[2 i], w[2 i], fma(x[2 i + 1], w[2 i + 1], sum))   in bfloat16,
// to which the bias is added and which is then rounded to the dtype. In bfloat16 the matrix
// registers of AMX, where isa(Op::kDense) is "amx", take 32 inputs at a time and begin two chains
// for them, one of the even inputs and one of the odd inputs: sum = sum + (even + odd). Numbers
// below 2^-126 count as zero, wherever they occur. Every result that is not a number is the same
// quiet NaN.
//
// So y is the same, bit for bit, with any number of threads and any other rows in the call: a token
// verified in a block has the product that it has alone. It is also the same on every processor,
// but for AMX in bfloat16, and for numbers that ARM treats as zero: sums just below 2^-126 that
// would round to it.
struct DenseProductParams {
  DenseShape shape;
  int64_t tokens = 0;            // m >= 0
  const void* x = nullptr;       // [m, k], unit stride along k
  int64_t x_stride = 0;          // elements from one token to the next, >= k
  const void* packed = nullptr;  // of dense_pack, 64-byte aligned; huge pages are read faster
  const void* bias = nullptr;    // [n], or null for none
  // [m, n], unit stride along n; apart from all that is read and from the workspace
  void* y = nullptr;
  int64_t y_stride = 0;       // elements from one token to the next, >= n
  void* workspace = nullptr;  // dense_workspace_bytes(shape, tokens), 64-byte aligned
};

// Memory that a call needs for its activations.
POLYSPEC_API int64_t dense_workspace_bytes(const DenseShape& shape, int64_t tokens);

// Runs on the CPU, on the stream's threads, which need 256 KiB of stack, or on CUDA.
//
// On CUDA `packed` is the weights themselves, [n, k] without gaps and without a label, there is no
// workspace, and the call is one launch. kUnsupported, without a launch, where another product has
// to multiply: devices before sm_90, float32, more than kDenseTokens tokens, inputs that are no
// multiple of 32, memory of x or of the weights (or the stride of x) that is no multiple of 16
// bytes, and activations that leave no room in shared memory (an H200 has room for 33,536 inputs).
// No kernel of the same CUDA graph writes the weights, which are read before earlier kernels of a
// graph have ended.
//
// Sums there are float32 on the tensor cores, in another order than above:
//   |y - exact| <= (k / 8 + 44) 2^-22 (sum_k |x_k w_nk| + |bias|) + (rounding of y to bfloat16)
// where no sum overflows. A row is the same, bit for bit, with any other rows in the call and any
// number of them; devices with tensor cores that add in the same way give the same bits.
constexpr int64_t kDenseTokens = 16;
POLYSPEC_API Result dense_product(const DenseProductParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
