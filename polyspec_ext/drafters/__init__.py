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
from .features import FeatureCache, Hydra, Medusa
from .lookup import NGramTable, PromptLookup, SuffixMatch
from .model import DraftModel, early_exit
from .proposals import ProposalDrafter
from .switching import SwitchingDrafter, levels_of
from .trees import DynamicTree, StaticTree
from .words import elements, is_drafter, register_word

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
    "FeatureCache",
    "HiddenStates",
    "Hydra",
    "Medusa",
    "NGramTable",
    "PromptLookup",
    "Proposal",
    "ProposalDrafter",
    "RowBuffer",
    "StaticTree",
    "SuffixMatch",
    "SwitchingDrafter",
    "early_exit",
    "elements",
    "is_drafter",
    "levels_of",
]

register_word("prompt-lookup", PromptLookup)
register_word("suffix", SuffixMatch)
register_word("ngram", NGramTable)
