// polyspec::decoder_layers: a few tokens through all decoder layers of a model in one call, on the
// CPU.
//
// Where every step of a layer is a separate call, a short pass of a small model spends much of its
// time between its products, on allocations, checks and dispatch. Here the layers are described
// once, and a pass is one call.
//
// The steps are the operators of layer.hpp, attention.hpp, kv_cache.hpp and of the products, in
// that order and with the same bits, so that the guarantee of each holds for the whole: a token's
// states are the same with any other tokens in the call and with any number of threads.
#pragma once

#include "polyspec/attention.hpp"
#include "polyspec/blocks.hpp"
#include "polyspec/dense.hpp"
#include "polyspec/int4.hpp"

namespace polyspec {

// Packed weights [outputs, inputs].
struct PackedMatrix {
  PackedLayout layout = PackedLayout::kDense;
  int64_t outputs = 0, inputs = 0;
  int32_t group = 128;                   // kInt4
  DType scale_dtype = DType::kBFloat16;  // kInt4
  BlockType type = BlockType::kQ4_K;     // kBlocks
  const void* packed = nullptr;
  const void* bias = nullptr;  // [outputs], of kDense only; nullptr: none
};

// Matrices one below the other, all with the same inputs.
struct PackedMatrices {
  const PackedMatrix* parts = nullptr;
  int64_t count = 0;  // >= 1
};

// A layer of Llama's kind: h = x + out(attention(norm(x))), y = h + down(gated(norm(h))).
struct DecoderLayer {
  const void* attention_norm = nullptr;  // [n], as of RmsNormParams
  PackedMatrices attention_in;           // [(h + 2 g) d, n]: queries, keys, values
  const void* attention_bias = nullptr;  // [(h + 2 g) d], added to the rounded product; or nullptr
  const void* query_norm = nullptr;      // [d], as of RotaryParams; or nullptr
  const void* key_norm = nullptr;        // [d], likewise
  PackedMatrices attention_out;          // [n, h d]
  const void* gated_norm = nullptr;      // [n]
  PackedMatrices gated_in;               // [2 f, n]: gate, up
  PackedMatrices gated_out;              // [n, f]
  void* keys = nullptr;                  // [b, g, capacity, d], unit stride along d
  void* values = nullptr;                // likewise
};

struct DecoderParams {
  const DecoderLayer* layers = nullptr;  // [count]
  int64_t count = 0;                     // >= 1
  int64_t batch = 0, tokens = 0;         // b, t
  int64_t width = 0;                     // n, of a state
  int64_t heads = 0, groups = 0;         // of queries, h, and of keys and values, g
  int64_t head_width = 0;                // d
  int64_t gated_width = 0;               // f
  DType dtype = DType::kFloat32;         // kFloat32 or kBFloat16, of all tensors
  float epsilon = 0.0f;                  // of the norms
  float scale = 1.0f;                    // of the scores
  const void* x = nullptr;               // [b, t, n]
  // As of RotaryParams.
  int64_t angles = 0;                             // p >= 1
  const void *cosine = nullptr, *sine = nullptr;  // [p, d]
  const int64_t* positions = nullptr;
  int64_t position_stride[2] = {}, position_step = 0;
  // The cache: new keys and values begin at slot `lengths`, and queries see slots [0, span).
  int64_t capacity = 0, span = 0;
  int64_t key_stride[3] = {}, value_stride[3] = {};  // of every layer: from one row, head and slot
  const int64_t* lengths = nullptr;                  // [b]
  const int64_t* counts = nullptr;                   // [b] in [0, t], new tokens; nullptr: t each
  const void* mask = nullptr;                        // [b, t, span], as of AttentionParams
  int64_t mask_stride[2] = {};
  bool causal = false;       // as of AttentionParams
  bool spread_keys = false;  // spans of keys are spread over the threads, too
  void* y = nullptr;         // [b, t, n] out, the states after the last layer
  // Layers with entering states to return as well, in [0, count), ascending.
  const int64_t* taken = nullptr;  // [num_taken]
  int64_t num_taken = 0;
  void* states = nullptr;     // [num_taken, b, t, n] out
  int32_t* status = nullptr;  // [b] out, as of AppendParams
  void* workspace = nullptr;  // decoder_workspace_bytes(params), 64-byte aligned
};

// -1 for parameters that are refused; the tensors are not looked at.
POLYSPEC_API int64_t decoder_workspace_bytes(const DecoderParams& params);

// Runs on the CPU, on the stream's threads; kUnsupported for a CUDA stream. Where a step is refused
// the message is that of the step, and keys and values from slot `lengths` on are undefined.
POLYSPEC_API Result decoder_layers(const DecoderParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
