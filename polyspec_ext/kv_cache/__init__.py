"""Caches of keys and values that roll back."""

from __future__ import annotations

from .prefixes import Prefixes
from .rollback import RollbackCache
from .state import CroppedState, SequenceState

__all__ = ["CroppedState", "Prefixes", "RollbackCache", "SequenceState"]
