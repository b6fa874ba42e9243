"""The command line: ``python -m polyspec_ext``."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
