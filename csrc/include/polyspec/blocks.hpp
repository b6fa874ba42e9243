// polyspec::block_product: a few rows of activations times a weight matrix in the blocks of a GGUF
// file, on the CPU. Weights are multiplied as the file has them: they are not rounded again.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

// By the numbers that GGUF files have. A block holds 32 inputs of an output with a scale d, or 256
// inputs in groups with scales that are whole numbers times d:
//   Q4_0, Q5_0   w = d (q - 8), d (q - 16)
//   Q4_1, Q5_1   w = d q + m
//   Q8_0         w = d q, q of 8 bits with a sign
//   Q4_K, Q5_K   w = (d s_j) q - (e m_j), groups of 32 inputs, s and m of 6 bits
//   Q6_K         w = (d s_j) (q - 32), groups of 16 inputs, s of 8 bits with a sign
enum class BlockType : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
};

// A matrix [outputs, inputs].
//
// Packed, it is a row of tiles of 16 outputs (the last one filled up with zeros), each tile a row
// of blocks, each block
//   16 d, 16 minima                  float16, by output: m, or -e, or 0;
//   s_j by output, m_j by output     of each group in turn, 8 bits, where the type has them;
//   the weights of each group        16 outputs in 4, 6 or 8 bits.
// 4 bits lie as in int4.hpp, 8 bits by output with four adjacent inputs. 6 bits, of which types of
// 5 use the lower, are the two high bits of 16 inputs, then the 4 low bits of these inputs. A label
// precedes the tiles, PackedLayout::kBlocks.
struct BlockShape {
  int64_t outputs = 0;                // n >= 1
  int64_t inputs = 0;                 // k, whole blocks: a multiple of 32, or of 256
  BlockType type = BlockType::kQ4_K;  // the label's dtype
};

// Bytes of an output's row in the file; -1 for a shape that is none.
POLYSPEC_API int64_t block_row_bytes(const BlockShape& shape);

// Bytes of the packed matrix; -1 for a shape that is none.
POLYSPEC_API int64_t block_packed_bytes(const BlockShape& shape);

struct BlockPackParams {
  BlockShape shape;
  const uint8_t* blocks = nullptr;  // [rows, block_row_bytes(shape)], as they are in the file
  uint8_t* packed = nullptr;        // out; block_packed_bytes(shape), 64-byte aligned
  // A matrix may be packed by ranges of outputs, so that not all of its blocks are in memory.
  int64_t first = 0;  // the output of `blocks`' first row, a multiple of 16
  int64_t rows = -1;  // 16 or more unless they are the last rows; -1: all from `first` on
};

// Writes the label and the rows of a range. Runs on the stream's threads; kUnsupported for a CUDA
// stream.
POLYSPEC_API Result block_pack(const BlockPackParams& params, Stream stream = Stream::cpu());

// Weights of some outputs in float32, as embeddings are looked up. Each operation above rounds,
// from left to right: (d s_j) q, then e m_j subtracted.
struct BlockRowsParams {
  BlockShape shape;
  int64_t count = 0;                // >= 0
  const int64_t* rows = nullptr;    // [count], 0 to n - 1 each
  const uint8_t* packed = nullptr;  // of block_pack, 64-byte aligned
  float* y = nullptr;               // out; [count, k], contiguous; apart from all that is read
};

// Runs on the stream's threads; kUnsupported for a CUDA stream.
POLYSPEC_API Result block_rows(const BlockRowsParams& params, Stream stream = Stream::cpu());

// y = x W^T with rounded activations. The activations of a token are rounded to whole numbers of
// -127 to 127 times a scale by groups of 32 inputs (Q6_K: 16), where the scale is the largest
// magnitude among them over 127 (0 where that is below 2^-100). Products of whole numbers are
// summed exactly, and the groups' sums, times both scales, in float32 in ascending order. How far y
// is from the product of x and the file's weights in exact arithmetic, with a_k the largest |x| of
// k's group:
//   |y - exact| <= (1/254 + 2^-22) sum_k a_k |w_nk|
//                  + (k / group + 1) 2^-22 sum_k a_k (|w_nk - minimum| + |minimum|)
//                  + (rounding of y to dtype)
// where all a_k are 0 or at least 2^-100 and no sum overflows; minimum is m, -e m_j or 0.
//
// y is the same, bit for bit, on every processor, with any number of threads and any other rows in
// the call. A row of x that holds an infinity or a NaN gives a row of NaN, and leaves the others
// alone.
struct BlockProductParams {
  BlockShape shape;
  int64_t tokens = 0;               // m >= 0
  DType dtype = DType::kFloat32;    // of x and y
  const void* x = nullptr;          // [m, k], unit stride along k
  int64_t x_stride = 0;             // elements from one token to the next, >= k
  const uint8_t* packed = nullptr;  // of block_pack, 64-byte aligned; huge pages are read faster
  // [m, n], unit stride along n; apart from all that is read and from the workspace
  void* y = nullptr;
  int64_t y_stride = 0;       // elements from one token to the next, >= n
  void* workspace = nullptr;  // block_workspace_bytes(shape, tokens), 64-byte aligned
};

// Memory that a call needs for its activations.
POLYSPEC_API int64_t block_workspace_bytes(const BlockShape& shape, int64_t tokens);

// Runs on the CPU, on the stream's threads; kUnsupported for a CUDA stream.
POLYSPEC_API Result block_product(const BlockProductParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
