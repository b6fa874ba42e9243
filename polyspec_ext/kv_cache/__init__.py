"""Caches of keys and values that roll back."""

from __future__ import annotations

from .rollback import CroppedState, RollbackCache, SequenceState

__all__ = ["CroppedState", "RollbackCache", "SequenceState"]
