"""The operators over torch tensors: verification and sampling, caches, the state row, products with
packed and with 4-bit weights."""

from __future__ import annotations

from .verification import (
    CutVerifyResult,
    SampleResult,
    TreeVerifyResult,
    VerifyResult,
    has_cuda,
    sample,
    verify,
    verify_tree,
)

__all__ = [
    "CutVerifyResult",
    "SampleResult",
    "TreeVerifyResult",
    "VerifyResult",
    "has_cuda",
    "sample",
    "verify",
    "verify_tree",
]
