// The operators of a decoder layer between its products: RMSNorm with the residual sum before it,
// rotary positions of queries and keys, and the gated activation.
//
// Other libraries compute each with many small operators. A pass of one token then spends as long
// on calls, or on launches, as on its weights.
//
// Every token is computed by itself and in a fixed order: its bits are the same on every processor,
// on CUDA, with any number of threads, and with any other tokens in the call. With kBFloat16 a
// value is rounded wherever a model of transformers' rounds it. Tensors are contiguous but for a
// stride that is named; outputs are apart from inputs.
#pragma once

#include "polyspec/export.h"
#include "polyspec/kv_cache.hpp"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

constexpr int64_t kRotaryWidth = 512;  // of a head, at most

// y = weight round(h / sqrt(mean(h^2) + epsilon)) with h = x, or h = round(x + residual).
struct RmsNormParams {
  int64_t tokens = 0, width = 0;   // m, n >= 1
  DType dtype = DType::kFloat32;   // kFloat32 or kBFloat16, of all tensors
  float epsilon = 0.0f;            // > 0
  const void* x = nullptr;         // [m, n]
  const void* residual = nullptr;  // [m, n]; nullptr: none
  const void* weight = nullptr;    // [n]; no kernel of the same CUDA graph writes it
  void* sum = nullptr;             // [m, n] out, h; needed with a residual, else not written
  void* y = nullptr;               // [m, n] out
};

// Splits a product into the heads of queries, keys and values; queries and keys are rotated by the
// positions: out = round(round(x cos) + round(rotated(x) sin)), where rotated(x) is
// (-second half, first half). (With kFloat32 nothing is rounded.)
struct RotaryParams {
  int64_t batch = 0, tokens = 0;  // b, t
  int64_t heads = 0, groups = 0;  // of queries, h, and of keys and of values, g; >= 1
  int64_t width = 0;              // d, even, in [2, kRotaryWidth]
  DType dtype = DType::kFloat32;  // kFloat32 or kBFloat16, of all tensors
  const void* x = nullptr;        // [b, t, (h + 2 g) d]: queries, keys, values
  const void* bias = nullptr;     // [(h + 2 g) d], added first, and rounded; or nullptr
  // [d] each, weights of an RMSNorm of every head of queries and of keys, before they are turned;
  // or nullptr both.
  const void *query_norm = nullptr, *key_norm = nullptr;
  float epsilon = 0.0f;  // > 0, of these norms
  int64_t angles = 0;    // p >= 1; a position outside of [0, p) counts as the nearest inside
  const void* cosine = nullptr;  // [p, d]
  const void* sine = nullptr;    // [p, d]
  // Token i of row b has the position positions[b * stride[0] + i * stride[1]] + i * position_step.
  const int64_t* positions = nullptr;
  int64_t position_stride[2] = {}, position_step = 0;
  void *query = nullptr, *key = nullptr, *value = nullptr;  // [b, h, t, d], [b, g, t, d] out
};

// The same, with keys and values appended to a cache of one run of slots per row (AppendParams
// without a ring): token i of row b goes to slot lengths[b] + i. Padding has queries alone.
struct RotaryAppendParams {
  RotaryParams turn;                 // without key and value
  int64_t capacity = 0;              // c >= 1
  KvCache keys, values;              // [b, g, c, d]
  const int64_t* lengths = nullptr;  // [b] tokens that each row holds already
  const int64_t* counts = nullptr;   // [b] in [0, t], new tokens of each row, or nullptr: t each
  int32_t* status = nullptr;         // [b] in and out: bits as of AppendParams are added
};

// y = round(silu(gate)) up, with silu(x) = x / (1 + exp(-x)).
struct GatedParams {
  int64_t tokens = 0, width = 0;  // m, n >= 0
  DType dtype = DType::kFloat32;  // kFloat32 or kBFloat16, of all tensors
  const void* x = nullptr;        // [m, 2 n]: gate, up
  void* y = nullptr;              // [m, n] out
};

// Run on the stream's device; on the CPU on the stream's threads where there are many tokens. On
// CUDA each is one launch.
POLYSPEC_API Result rms_norm(const RmsNormParams& params, Stream stream = Stream::cpu());
POLYSPEC_API Result rotary(const RotaryParams& params, Stream stream = Stream::cpu());
POLYSPEC_API Result rotary_append(const RotaryAppendParams& params, Stream stream = Stream::cpu());
POLYSPEC_API Result gated(const GatedParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
