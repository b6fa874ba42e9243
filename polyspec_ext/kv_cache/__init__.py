"""Caches of keys and values that roll back."""

from __future__ import annotations

from .rollback import RollbackCache

__all__ = ["RollbackCache"]
