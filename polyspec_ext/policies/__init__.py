"""Policies that choose windows while a chain runs."""

from __future__ import annotations

from .base import RoundReport, WindowPolicy

__all__ = ["RoundReport", "WindowPolicy"]
