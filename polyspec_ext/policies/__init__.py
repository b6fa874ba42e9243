"""Policies that choose windows while a chain runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import RoundReport, StepReport, WindowPolicy

if TYPE_CHECKING:
    from .adaptive import POLICIES, Adaptive, CachedFsm, DrafterChoice, Fixed, Joint, Online, named

__all__ = [
    "POLICIES", "Adaptive", "CachedFsm", "DrafterChoice", "Fixed", "Joint", "Online", "RoundReport",
    "StepReport", "WindowPolicy", "named",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # imported when first used
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".adaptive", __name__), name)
