"""The operators over torch tensors: verification and sampling, caches, the state row, products with
packed and with 4-bit weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _C as _C  # registers the operators

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import verification  # the chain needs none of it

    return getattr(verification, name)
