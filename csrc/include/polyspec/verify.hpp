// polyspec::verify: judge a drafted block against the target's logits and emit what stands.
#pragma once

#include "polyspec/sample.hpp"

namespace polyspec {

// Row i of the target's logits is the law of the token after i draft tokens, so row i judges
// draft token i and row `length` gives the bonus token. With
// p, q the processed laws of target and draft:
//   rule token: accept y while u < p(y)/q(y); at the first rejection draw from norm(max(p - q, 0));
//   rule block: p_i = min(1, p_{i-1} p(y_i)/q(y_i)),  S_i = sum_x max(p_i p(x) - q(x), 0),
//               h_i = S_i / (S_i + 1 - p_i), h_m = p_m; keep the largest i with u_i < h_i, then
//               draw from norm(max(p_i p - q, 0)), or the bonus from p when the whole block stands.
// Either way the emitted tokens have exactly the target's law. Without draft logits q is one-hot at
// the draft token (a deterministic proposal).
struct VerifyParams {
  int64_t batch = 0;        // b
  int64_t draft_len = 0;    // k >= 0
  int64_t vocab = 0;        // v, in [1, 2^31)
  int64_t draft_vocab = 0;  // vd, in [1, v]; ids past it have q = 0. Ignored without draft logits

  DType target_dtype = DType::kFloat32;
  const void* target_logits = nullptr;  // [b, k+1, v], unit stride along v
  int64_t target_stride[2] = {0, 0};    // elements per request, per row

  DType draft_dtype = DType::kFloat32;
  const void* draft_logits = nullptr;  // [b, k, vd] or nullptr: deterministic proposal
  int64_t draft_stride[2] = {0, 0};    // elements per request, per row
  const RowLaw* draft_laws =
      nullptr;  // [b, k] contiguous, as `sample` and `verify` gave them for the
                // same rows and sampling parameters; nullptr: computed here
  const int32_t* target_to_draft =
      nullptr;  // [v] draft id of each target id, -1: none. nullptr: identity

  const int64_t* draft_tokens = nullptr;   // [b, k] target ids; entries past a length are not read
  int64_t draft_tokens_stride = 0;         // elements per request
  const int64_t* draft_lengths = nullptr;  // [b] in [0, k], or nullptr: k for every request

  SamplingParams sampling;  // the same for both laws (contract C1)
  DrawParams draw;          // position: that of the first draft token
  Rule rule = Rule::kToken;

  int64_t* tokens = nullptr;        // [b, k+1] accepted prefix, correction or bonus, then -1
  int64_t* num_accepted = nullptr;  // [b] in [0, length]
  float* logprobs = nullptr;        // [b, k+1] log p of each emitted token, NaN past them
  int32_t* status = nullptr;        // [b] StatusBits
  RowLaw* laws =
      nullptr;  // [b, k+1] target law of each emitted token, for the level above; or nullptr
};

// Judges b blocks. On the CPU the outputs are written when the call returns; on CUDA the work is
// queued. After a rejection in a row, later rows are not read (rule token).
Result verify(const VerifyParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
