// Types shared by every operator: element types, per-request parameters, row distributions and
// where a call runs.
//
// No torch and no CUDA header is included here; a CUDA stream is only forward-declared.
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to this

namespace polyspec {

// Element type of a logits tensor.
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Layouts of packed weights (dense.hpp, int4.hpp, blocks.hpp). A label of kPackedLabelBytes before
// them has this id and their shape, so that a product refuses weights of another layout or shape
// before it reads any, and a program weights of another release. An id is never reused for another
// layout (1, 2 and 3 had their labels after the weights).
enum class PackedLayout : int32_t { kDense = 4, kInt4 = 5, kBlocks = 6 };
constexpr int64_t kPackedLabelBytes = 64;

// How a drafted block is verified.
enum class Rule : int32_t {
  kToken = 0,  // token by token: accept while u < p/q (Leviathan et al. 2023)
  kBlock = 1,  // the block as a whole, never shorter on average (Sun et al. 2024, arXiv 2403.10444)
};

// A parameter with one value for the whole batch, or one per request.
// `data` lives where the call runs (device memory for a CUDA call) and is read there.
template <class T>
struct PerRequest {
  const T* data = nullptr;  // [b], or nullptr: `value` holds for every request
  T value{};
};

// The distribution of one row of logits z, for evaluation at any token without reading the row
// again. The distribution of token x is the exact rational m_x / mass with the integer
//   m_x = trunc(2^S * exp2((z_x - max) * slope))  where z_x >= threshold,  else 0,
// S = 62 - ceil(log2(vocabulary)), slope = log2(e) / T. Integers add up to the same total in any
// order, so the distribution, and every token drawn from it, is the same on a CPU thread, a CUDA
// block and a cluster (contract C3). The draft sampler produces one RowStatistics per token and the
// verifier above consumes it: the distribution handed up is then the distribution sampled from, bit
// for bit (contract C1).
//
// The arithmetic, to recompute a mass (as reference_rules.py of the tests does). Every step is
// one IEEE operation, rounded to nearest, in float32 unless said otherwise; logits in bfloat16 and
// float16 widen exactly and -0 counts as 0:
//   slope = float32(1.4426950408889634 / T) with T widened to float64 and at least 2^-126;
//   x = max(-100, (z - max) * slope);  n = x rounded to an integer, ties to even;  f = x - n;
//   2^f = the polynomial in f by Horner's scheme with a fused multiply-add for each coefficient:
//     0.00015353362, 0.0013398874, 0.009618437, 0.055503324, 0.24022648, 0.6931472, 1;
//   m = trunc(2^(S + n) * 2^f), exact in float64.
//
// The distance to the softmax p of the same kept logits at the same float32 temperature, in exact
// arithmetic, with V the vocabulary and p_max the largest probability:
//   a row's total variation is at most  t = 2e-7 log2(V) + 1e-7 + 2^-S V,  3.6e-6 at V = 2^17;
//   a probability is off by at most  p(x) (2e-7 log2(p_max / p(x)) + 1e-7 + t) + 2^-S p_max,
//     with the truncation as the last term: a token with p(x) < 2^-S p_max may have mass 0 (S = 45
//     at V = 2^17), and rows of hundreds of millions of tokens would lose mass this way.
// The bounds hold for any range of logits, -inf included. Which token an edge of top-p or min-p
// falls on is decided by these masses, so a token as close to the edge as that may fall on either
// side.
struct RowStatistics {
  float max;        // largest logit of the row
  float threshold;  // smallest logit that the filters keep; -inf without filters
  // Sum of m_x over the kept tokens, >= 2^S; 1 at temperature 0 (one-hot distribution).
  uint64_t mass;
};

// Runs body(context, i) for every i in [0, n), in any order and on any threads, and returns when
// all are done. The library owns no threads: an embedder lends its threads.
struct Executor {
  using Body = void (*)(void* context, int64_t index);
  void (*run)(void* pool, int64_t n, Body body, void* context) = nullptr;  // nullptr: serially
  void* pool = nullptr;                                                    // handed to `run`
};

// Where a call runs. A CUDA call is asynchronous: it launches on the stream and returns.
struct Stream {
  enum class Device : int32_t { kCpu = 0, kCuda = 1 };
  Device device = Device::kCpu;
  CUstream_st* cuda = nullptr;  // the stream of a CUDA call; nullptr is the legacy default stream
  Executor executor{};          // the threads of a CPU call

  static Stream cpu(Executor executor = {}) { return {Device::kCpu, nullptr, executor}; }
  static Stream on(CUstream_st* stream) { return {Device::kCuda, stream, {}}; }
};

}  // namespace polyspec
