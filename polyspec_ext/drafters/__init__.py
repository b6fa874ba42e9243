"""Drafters: the lowest level of a chain, which proposes tokens."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from .words import elements, is_drafter

if TYPE_CHECKING:
    from .dflash import DFlash
    from .eagle import Eagle
    from .features import FeatureCache, Hydra, Medusa
    from .lookup import NGramTable, PromptLookup, SuffixMatch
    from .mtp import MTP
    from .proposals import ProposalDrafter
    from .switching import SwitchingDrafter
    from .trees import DynamicTree, StaticTree

__all__ = [
    "MTP", "BatchedDrafter", "Context", "DFlash", "DraftBlock", "DraftInput", "DraftModel",
    "Drafter", "DrafterCapabilities", "DynamicTree", "Eagle", "FeatureCache", "HiddenStates",
    "Hydra", "Medusa", "NGramTable", "PromptLookup", "Proposal", "ProposalDrafter", "RowBuffer",
    "StaticTree", "SuffixMatch", "SwitchingDrafter", "elements", "is_drafter",
    "levels_of",
]  # fmt: skip

# Imported when first used: all but models as drafters.
_LATER = {
    "DFlash": "dflash", "DynamicTree": "trees", "Eagle": "eagle", "FeatureCache": "features",
    "Hydra": "features", "MTP": "mtp", "Medusa": "features", "NGramTable": "lookup",
    "PromptLookup": "lookup", "ProposalDrafter": "proposals", "StaticTree": "trees",
    "SuffixMatch": "lookup", "SwitchingDrafter": "switching",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
