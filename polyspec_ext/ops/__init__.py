"""The operators over torch tensors: verification and sampling, decoder layers and their caches, the
state row, products with packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _C as _C  # registers the operators
from .. import rooms
from .verification import CutVerifyResult, SampleResult, VerifyResult, has_cuda, sample, verify

if TYPE_CHECKING:
    TreeVerifyResult = rooms.tree_operators.TreeVerifyResult
    verify_tree = rooms.tree_operators.verify_tree

__all__ = [
    "CutVerifyResult", "SampleResult", "TreeVerifyResult", "VerifyResult", "has_cuda", "sample",
    "verify", "verify_tree",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # imported when first used
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(rooms.tree_operators, name)
