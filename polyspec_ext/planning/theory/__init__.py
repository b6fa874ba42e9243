"""What theory says about a chain of models: pure functions of acceptances and times.

* `insertion`: Lemma 3.1 and Theorem 3.2 of Wang et al. (ICML 2025), as printed and exact.
* `renewal`: expected tokens and seconds of a chain that does what the engine does, out of what one
  round of it may do (`rounds`), with given times and acceptances (`acceptance`).
"""

from __future__ import annotations

from .acceptance import Acceptance, ConstantSeconds, Floats, PassSeconds, Proposals
from .insertion import InsertionTest, insertion_test, lemma_seconds
from .renewal import Expectation, batches, expectation, starts

__all__ = [
    "Acceptance",
    "ConstantSeconds",
    "Expectation",
    "Floats",
    "InsertionTest",
    "PassSeconds",
    "Proposals",
    "batches",
    "expectation",
    "insertion_test",
    "lemma_seconds",
    "starts",
]
