// polyspec::attention: a few queries per row over a cache of keys and values.
//
// A verification reads a few tokens after a long text. Kernels for prompts work in blocks of far
// more queries, want keys and masks laid out for every query head, and cost the pass more than its
// arithmetic does; this one reads grouped keys and values as they lie.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

constexpr int64_t kAttentionStep = 32;    // widths of heads are multiples of it
constexpr int64_t kAttentionWidth = 256;  // and at most this
constexpr int64_t kAttentionSpan = 512;   // keys that are summed separately
// Bytes of stack that `attention` needs of each thread that runs it. (It allocates nothing.)
constexpr int64_t kAttentionStack = 144 << 10;

// out[b, t, h] = sum_n w_n value[b, h / share, n] with weights w that are proportional to
// exp(scale query[b, h, t] . key[b, h / share, n] + mask[b, t, n]) and add up to 1, for
// share = heads / groups. Scores, weights and sums are float32, of products that are fused into the
// sums in a fixed order: each span of kAttentionSpan keys separately, then span after span. out is
// rounded to dtype.
//
// A row of out is the same, bit for bit, on every processor, with any number of threads, with any
// other queries in the call, and with any later keys that the mask hides (with -inf or the lowest
// number of dtype, and values that are finite) or that causal hides. Where all keys are hidden, out
// is 0; where a score that is not hidden is NaN or +inf, out is NaN.
//
// On CUDA all this holds, with the CPU's bits in float32. In bfloat16 tensor cores multiply, with
// each weight as a sum of two bfloat16 numbers (16 bits). Sums are float32, but the order in which
// products are added, and so the last bits, may differ from one model of a device to another.
struct AttentionParams {
  int64_t batch = 0, heads = 0, groups = 0;  // b, h, heads of keys; heads a multiple of groups
  int64_t tokens = 0, length = 0;            // t, n >= 1
  int64_t width = 0, value_width = 0;        // d, e: of a key, of a value; kAttentionStep, ...Width
  DType dtype = DType::kFloat32;             // kFloat32 or kBFloat16, of all tensors
  bool causal = false;  // token t sees keys [0, length - tokens + t] only; then length >= tokens
  // [b], not with causal: token t of row b sees keys [0, lengths[b] + t] only, which the device
  // looks up; nullptr: all that causal and the mask leave.
  const int64_t* lengths = nullptr;
  float scale = 1.0f;
  const void* query = nullptr;   // [b, h, t, d], unit stride along d
  const void* key = nullptr;     // [b, groups, n, d], unit stride along d
  const void* value = nullptr;   // [b, groups, n, e], unit stride along e
  const void* mask = nullptr;    // [b, t, n], unit stride along n; nullptr: nothing is hidden
  int64_t query_stride[3] = {};  // elements from one row, head and token to the next
  int64_t key_stride[3] = {};
  int64_t value_stride[3] = {};
  int64_t mask_stride[2] = {};  // from one row and token to the next; 0: the same for all
  void* out = nullptr;          // [b, t, h, e], contiguous
  // attention_workspace_bytes(params) to spread spans of keys over the threads as well, 64-byte
  // aligned; nullptr: a thread reads all keys of its queries, which suits where batch * groups are
  // as many as the threads. On CUDA it is needed where length > kAttentionSpan.
  void* workspace = nullptr;
};

// -1 for parameters that are refused; the tensors are not looked at.
POLYSPEC_API int64_t attention_workspace_bytes(const AttentionParams& params);

// Runs on the stream's device: on the CPU on the stream's threads, each with kAttentionStack bytes
// of stack to spare; on CUDA in one launch, and one more where length > kAttentionSpan. There keys
// and values must begin at multiples of 16 bytes in every row, head and slot.
POLYSPEC_API Result attention(const AttentionParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
