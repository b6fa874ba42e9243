"""Caches of keys and values that roll back."""

from __future__ import annotations

from .prefixes import Prefixes
from .rollback import CroppedState, RollbackCache, SequenceState

__all__ = ["CroppedState", "Prefixes", "RollbackCache", "SequenceState"]
