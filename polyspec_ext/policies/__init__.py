"""Policies that choose windows while a chain runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adaptive import (
    POLICIES,
    Adaptive,
    CachedFsm,
    Fixed,
    Joint,
    Online,
    RoundReport,
    StepReport,
    WindowPolicy,
    named,
)

if TYPE_CHECKING:
    from .drafter_choice import DrafterChoice

__all__ = [
    "POLICIES", "Adaptive", "CachedFsm", "DrafterChoice", "Fixed", "Joint", "Online", "RoundReport",
    "StepReport", "WindowPolicy", "named",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "DrafterChoice":  # with a `SwitchingDrafter` only
        from .drafter_choice import DrafterChoice

        return DrafterChoice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
