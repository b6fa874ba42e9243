"""The operators over torch tensors: verification and sampling, decoder layers and their caches, the
state row, products with packed weights."""

from __future__ import annotations

from .. import _C as _C  # registers the operators
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
