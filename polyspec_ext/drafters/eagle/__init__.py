"""EAGLE heads: drafters that read the hidden states of the model that they draft for."""

from __future__ import annotations

from .config import EagleConfig
from .drafter import Eagle
from .load import head_place, is_head
from .network import EagleNetwork

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "head_place", "is_head"]
