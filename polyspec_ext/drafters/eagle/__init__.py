"""EAGLE heads: drafters that read the hidden states of the model that they draft for."""

from __future__ import annotations

from .config import EagleConfig
from .network import EagleNetwork

__all__ = ["EagleConfig", "EagleNetwork"]
