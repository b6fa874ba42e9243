"""Levels: the models of a chain, behind one contract."""

from __future__ import annotations

from .base import HuggingFaceLevel, Level, as_level, device_of, found, load

__all__ = ["HuggingFaceLevel", "Level", "as_level", "device_of", "found", "load"]
