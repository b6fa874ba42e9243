// The rules as a textbook has them, on one thread with the standard library: the peer to compare
// with.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "inputs.hpp"

namespace textbook {

// The processed distribution [v] of a row of logits: temperature 1, top-k, top-p, min-p by sorting.
std::vector<double> statistics(const float* logits, int64_t vocab,
                               const polyspec::SamplingParams& sampling);

// A token from the first target row of a request.
int64_t sample(const Inputs& inputs, int64_t request, std::mt19937_64& engine);

// The token rule (Leviathan et al. 2023, algorithm 1) for a request, from the logits of both
// models; it stops at the first rejection. Returns the number of accepted tokens and writes the
// token emitted after.
int64_t verify(const Inputs& inputs, int64_t request, std::mt19937_64& engine, int64_t* emitted);

}  // namespace textbook
