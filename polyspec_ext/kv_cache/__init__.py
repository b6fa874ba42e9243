"""Caches of keys and values that roll back."""

from __future__ import annotations

from .rollback import RollbackCache
from .state import CroppedState, SequenceState

__all__ = ["CroppedState", "RollbackCache", "SequenceState"]
