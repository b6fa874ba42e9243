"""Policies that choose windows while a chain runs."""

from __future__ import annotations

from .adaptive import POLICIES, Adaptive, CachedFsm, Fixed, Fsm, Joint, Online, QLearning, named
from .base import RoundReport, StepReport, WindowPolicy

__all__ = [
    "POLICIES",
    "Adaptive",
    "CachedFsm",
    "Fixed",
    "Fsm",
    "Joint",
    "Online",
    "QLearning",
    "RoundReport",
    "StepReport",
    "WindowPolicy",
    "named",
]
