"""Policies that choose windows while a chain runs."""

from __future__ import annotations

from .adaptive import POLICIES, Adaptive, CachedFsm, Fixed, Joint, Online, named
from .base import RoundReport, StepReport, WindowPolicy
from .drafter_choice import DrafterChoice

__all__ = [
    "POLICIES",
    "Adaptive",
    "CachedFsm",
    "DrafterChoice",
    "Fixed",
    "Joint",
    "Online",
    "RoundReport",
    "StepReport",
    "WindowPolicy",
    "named",
]
