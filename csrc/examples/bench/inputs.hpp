// The measured cases, and logits and drafts with a wanted acceptance rate.
#pragma once

#include <cstdint>
#include <vector>

#include "polyspec/verify.hpp"

// The shape of a case.
struct Shape {
  int64_t batch = 1;        // b
  int64_t draft_len = 10;   // k
  int64_t vocab = 128256;   // v
  double acceptance = 0.7;  // wanted probability that a draft token is accepted
  polyspec::SamplingParams sampling;
  uint64_t seed = 0;
};

// Draft logits are normal with deviation 3, target logits the draft's plus noise with a size found
// in every row by bisection: sum_x min(p(x), q(x)) of the processed distributions, which is the
// probability that a token drawn from q is accepted against p, is the requested rate.
struct Inputs {
  Shape shape;
  std::vector<float> target;                        // [b, k+1, v]
  std::vector<float> draft;                         // [b, k, v]
  std::vector<int64_t> tokens;                      // [b, k]
  std::vector<polyspec::RowStatistics> statistics;  // [b, k]
  std::vector<uint64_t> seeds;                      // [b]

  // Outputs of both operators, [b, k+1] or [b].
  std::vector<int64_t> out_tokens;
  std::vector<int64_t> accepted;
  std::vector<float> logprobs;
  std::vector<int32_t> status;

  explicit Inputs(const Shape& wanted);

  // New draft tokens and seeds for a turn; everybody measured in it sees the same.
  void load(uint64_t turn, const polyspec::Stream& stream);

  polyspec::VerifyParams verify(polyspec::Rule rule, bool with_statistics);
  polyspec::SampleParams sample();  // the first target row of each request
};
