// How the example compares a chain with its target alone; try the same on your models.
#pragma once

#include "polyspec/engines/chain.hpp"

// The same text without a chain, one pass of `target` and one `polyspec::sample` per token. Throws
// std::runtime_error when a call fails.
std::vector<int64_t> generate_plainly(polyspec::Engine& target, const std::vector<int64_t>& prompt,
                                      const polyspec::ChainSettings& settings);

// Mean of -log p per token of `text`, in nats, under the target as it is, without temperature and
// filters. Needs logits that are log p, as of NgramModel. 0 for an empty text.
double cross_entropy(polyspec::Engine& target, const std::vector<int64_t>& prompt,
                     const std::vector<int64_t>& text);

struct Comparison {
  int64_t cells = 0;  // pairs of tokens that are counted apart
  double chi_square = 0;
  double sigmas = 0;  // chi_square as a normal deviate; beyond 4.75 with probability 1e-6
};

// Whether chain and target draw from one distribution: generates `trials` short texts with either,
// keyed by the seeds settings.seed, settings.seed + 1, ..., counts their third and fourth token as
// one cell and takes the two-sample chi-square statistic. Cells seen less than 20 times count as
// one.
Comparison compare_distributions(polyspec::Chain& chain, polyspec::Engine& target,
                                 const std::vector<int64_t>& prompt,
                                 polyspec::ChainSettings settings, int64_t trials);
