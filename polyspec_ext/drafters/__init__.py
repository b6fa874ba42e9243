"""Drafters: the lowest level of a chain, which proposes tokens. Each is in a file, and public as
`polyspec_ext.NAME`; here are their contracts."""

from __future__ import annotations

from .base import (
    BatchedDrafter,
    Context,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    HiddenStates,
    Proposal,
    RowBuffer,
    levels_of,
)
from .model import DraftModel
from .words import elements, is_drafter, resolve

__all__ = [
    "BatchedDrafter", "Context", "DraftBlock", "DraftInput", "DraftModel", "Drafter",
    "DrafterCapabilities", "HiddenStates", "Proposal", "RowBuffer", "elements", "is_drafter",
    "levels_of", "resolve",
]  # fmt: skip
