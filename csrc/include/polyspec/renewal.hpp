// The renewal model of a chain: the tokens of one pass of the target, and the passes of every other
// level for it.
//
// Level i < n accepts each pending token with probability acceptance[i-1], if the tokens before it
// were accepted, and emits one token more: its correction or its bonus. Emitted tokens are pending
// for level i - 1, which verifies once windows[i-2] tokens have come, or rounds[i-2] blocks.
// Rounds of one level are independent and alike, so a pass of the target is a renewal:
//   seconds per token = (sum over i of passes_i T_i) / tokens.
// For three levels this is (T_1 + R (T_2 + B T_3)) / tau, the form that counts the tokens that the
// target rejects, which Lemma 3.1 of Wang et al. (ICML 2025) leaves out; with the default bounds on
// rounds, tokens is the closed form of Chen et al. (2023), (1 - a phi(a)^R) / (1 - a).
#pragma once

#include <cstdint>
#include <vector>

#include "polyspec/export.h"

namespace polyspec {

struct RenewalRound {
  double tokens = 0;             // expected tokens of the target, with correction or bonus
  std::vector<double> passes;    // [n] passes of level i per pass of the target; of n: its drafts
  std::vector<double> verified;  // [n-1] expected tokens that a pass of level i verifies
};

// acceptance: [n-1] in [0, 1]. windows: [n-1] >= 0, a window of 0 lets the level decode alone.
// rounds: [n-1] >= 0, 0 is no bound; the last one has no meaning. Empty: as many as fill the window
// if all is accepted, ceil(windows[i-1] / (windows[i] + 1)).
// Throws std::invalid_argument for other sizes or values.
POLYSPEC_API RenewalRound renewal_round(const std::vector<double>& acceptance,
                                        const std::vector<int64_t>& windows,
                                        std::vector<int64_t> rounds = {});

}  // namespace polyspec
