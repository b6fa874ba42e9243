// polyspec::sample: one token per request from the processed law of its logits.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

// The processed law: temperature, then top-k, top-p and min-p, in that order, each on what the last
// kept. Ties at a filter's edge are all kept. Temperature 0 is the argmax, lowest id on ties (C5).
struct SamplingParams {
  PerRequest<float> temperature{nullptr, 1.0f};  // finite, >= 0
  PerRequest<int64_t> top_k{nullptr, 0};         // >= 0; 0: off
  PerRequest<float> top_p{nullptr, 1.0f};  // in [0, 1]; 1: off; the likeliest token always stays
  PerRequest<float> min_p{nullptr, 0.0f};  // in [0, 1]; 0: off
};

// What keys a request's draws beside their purpose (contract C3). The absolute position of a token,
// the level that draws and its round make a draw unique; the batch does not enter.
struct DrawParams {
  PerRequest<uint64_t> seed{nullptr, 0};
  PerRequest<int64_t> position{nullptr,
                               0};        // >= 0; absolute index of the first token judged or drawn
  PerRequest<int64_t> round{nullptr, 0};  // in [0, 2^32); counts the level's draws at a position
  int32_t level = 1;                      // in [1, 2^16); 1 is the target
  // Draws of the caller's own in place of Philox, for another generator or an exact enumeration:
  // [b, 1] for sample, [b, k+1] for verify (k acceptance tests, then the emitted token).
  const uint64_t* bits = nullptr;
};

struct SampleParams {
  int64_t batch = 0;  // b
  int64_t vocab = 0;  // v, in [1, 2^31)
  DType dtype = DType::kFloat32;
  const void* logits = nullptr;  // [b, v], unit stride along v
  int64_t logits_stride = 0;     // elements from one request to the next
  SamplingParams sampling;
  DrawParams draw;

  int64_t* tokens = nullptr;  // [b]; -1 where the status has an error
  float* logprobs =
      nullptr;  // [b] natural log of the token's probability; NaN where there is no token
  int32_t* status = nullptr;  // [b] StatusBits
  RowLaw* laws = nullptr;     // [b] law of each row, for the verifier above; may be nullptr
};

// Draws b tokens. On the CPU the outputs are written when the call returns; on CUDA the work is
// queued.
POLYSPEC_API Result sample(const SampleParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
