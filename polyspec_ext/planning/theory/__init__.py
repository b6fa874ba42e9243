"""What theory says about a chain of models: pure functions of acceptances and times.

* `insertion`: Lemma 3.1 and Theorem 3.2 of Wang et al. (ICML 2025), as printed and exact.
* `lengths`: how many tokens a verification accepts, by the token, block and tree rules; Theorem 3.3
  and its erratum.
* `renewal`: expected tokens and seconds of a chain that does what the engine does, out of what one
  round of it may do (`rounds`), with given times and acceptances (`acceptance`).
* `cascade`: the closed form of Cascade Speculative Drafting.
"""

from __future__ import annotations

from .acceptance import Acceptance, ConstantSeconds, Floats, PassSeconds, Proposals
from .cascade import cascade_improvement
from .insertion import InsertionTest, insertion_bound, insertion_test, lemma_seconds
from .lengths import (
    accepted_distribution,
    block_length,
    length_mean,
    length_variance,
    length_variance_as_printed,
    token_length,
    tree_length,
)
from .renewal import Expectation, batches, expectation, starts

__all__ = [
    "Acceptance",
    "ConstantSeconds",
    "Expectation",
    "Floats",
    "InsertionTest",
    "PassSeconds",
    "Proposals",
    "accepted_distribution",
    "batches",
    "block_length",
    "cascade_improvement",
    "expectation",
    "insertion_bound",
    "insertion_test",
    "lemma_seconds",
    "length_mean",
    "length_variance",
    "length_variance_as_printed",
    "starts",
    "token_length",
    "tree_length",
]
