"""Drafters: what proposes tokens at the bottom of a chain."""

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
)
from .eagle import Eagle
from .model import DraftModel
from .prompt_lookup import PromptLookup
from .proposals import ProposalDrafter
from .trees import DynamicTree, StaticTree

__all__ = [
    "BatchedDrafter",
    "Context",
    "DraftBlock",
    "DraftInput",
    "DraftModel",
    "Drafter",
    "DrafterCapabilities",
    "DynamicTree",
    "Eagle",
    "HiddenStates",
    "PromptLookup",
    "Proposal",
    "ProposalDrafter",
    "RowBuffer",
    "StaticTree",
]
