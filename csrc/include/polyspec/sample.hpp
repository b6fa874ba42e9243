// polyspec::sample: one token per request from the processed distribution of its logits.
#pragma once

#include "polyspec/export.h"
#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

namespace polyspec {

// The processed distribution: temperature, then top-k, top-p and min-p, in that order, each on the
// tokens that the last kept. Ties at a filter's edge are all kept. Temperature 0 is the argmax,
// lowest id on ties (C5).
//
// The thresholds (RowStatistics::threshold is the largest of them), to recompute them:
//   top-k  the k-th largest logit;
//   top-p  the largest logit for which the masses of it and all larger logits reach
//          max(1, ceil(float64(top_p) * float64(total))), `total` the mass of the tokens that top-k
//          keeps;
//   min-p  float32(max + T * log(min_p)) in float64; its log is the one of `logprobs` below.
// On CUDA a call with all filters off by `value`, which the host can read, takes a smaller kernel.
struct SamplingParams {
  // In [0, 2^120]: hotter than that, logits that differ by more than float32 holds would still have
  // probability. Between 0 and 2^-126 it counts as 2^-126.
  PerRequest<float> temperature{nullptr, 1.0f};
  PerRequest<int64_t> top_k{nullptr, 0};   // >= 0; 0: off
  PerRequest<float> top_p{nullptr, 1.0f};  // in [0, 1]; 1: off; the likeliest token always stays
  PerRequest<float> min_p{nullptr, 0.0f};  // in [0, 1]; 0: off
};

// The key of a request's draws, with their purpose (contract C3). The absolute position of a token,
// the level that draws and its round make a draw unique; the batch does not enter.
struct DrawParams {
  PerRequest<uint64_t> seed{nullptr, 0};
  // Absolute, of the first token verified or drawn: >= 0, and so that no token's exceeds 2^63 - 1.
  PerRequest<int64_t> position{nullptr, 0};
  PerRequest<int64_t> round{nullptr, 0};  // in [0, 2^32); counts the level's draws at a position
  int32_t level = 1;                      // in [1, 2^16); 1 is the target
  // Draws of the caller instead of Philox, for another generator or an exact enumeration: [b, 1]
  // for sample, [b, k+1] for verify (k acceptance tests, then the emitted token).
  const uint64_t* bits = nullptr;
  // With `bits`, the draws of the tries of a correction (verify.hpp): [b, 2 kResidualTries], token
  // and test of each in turn. nullptr: with `bits` there are no tries.
  const uint64_t* try_bits = nullptr;
};

// A stride that is left at 0 is that of elements side by side, here and in the other operators;
// some say otherwise.
//
// The token of 64 bits u (philox.hpp: draw_bits at `position` + `ahead` and `node`, kSample) is the
// first, in the order of ids, at which the running sum of masses exceeds floor(u * mass / 2^64).
// Its log-probability is float32((z - max) / T - log(mass / 2^S)) in float64, 0 at temperature 0,
// with
//   log(2^e m) = 2 s (1 + s^2/3 + ... + s^20/21) + 0.6931471805599453 e,  s = (m - 1) / (m + 1),
// m in (1.4142135623730951 / 2, 1.4142135623730951], by Horner's scheme in s^2.
struct SampleParams {
  int64_t batch = 0;  // b
  int64_t vocab = 0;  // v, in [1, 2^31)
  DType dtype = DType::kFloat32;
  const void* logits = nullptr;  // [b, v], unit stride along v
  int64_t logits_stride = 0;     // elements from one request to the next
  // [b, ceil(v / 32)] allowed ids, bit i % 32 of word i / 32: a forbidden id has probability 0, as
  // if its logit were -inf. Contiguous words of a row; nullptr: all are allowed.
  const int32_t* allowed = nullptr;
  int64_t allowed_stride = 0;  // words from one request to the next
  SamplingParams sampling;
  DrawParams draw;
  PerRequest<int64_t> node{nullptr, 0};  // in [0, 2^14); one of several draws for a position
  int64_t ahead = 0;  // >= 0; tokens that are drawn already from `position` on, in every request

  int64_t* tokens = nullptr;  // [b]; -1 where the status has an error
  float* logprobs = nullptr;  // [b] natural log of the token's probability; NaN without a token
  int32_t* status = nullptr;  // [b] StatusBits
  // [b] distribution of each row, for the verifier above; may be nullptr.
  RowStatistics* statistics = nullptr;
  // Elements from one request's result to the next, >= 1: the results may be columns of tables.
  int64_t stride = 1;             // of `tokens` and `status`
  int64_t statistics_stride = 1;  // of `statistics`
  // [b] the tokens once more, side by side, at least `least_id`; may be nullptr
  int64_t* next_ids = nullptr;
  int64_t least_id = -1;  // 0: a pass may read them
};

// Draws b tokens. On the CPU the outputs are written when the call returns; on CUDA the work is
// queued.
POLYSPEC_API Result sample(const SampleParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec
