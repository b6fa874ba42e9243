"""The sampling parameters of one request, shared by every level of a chain (contract C1)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become a law: temperature, then top-k, top-p and min-p. 0, 1.0 and 0.0 mean off.

    Raises:
        ValueError: a parameter is out of range; names the parameter, what is allowed and what was
        given.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature: expected a finite number >= 0, given {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k: expected an integer >= 0 (0: off), given {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: expected a number in [0, 1], given {value}")

    @property
    def greedy(self) -> bool:
        """Whether every law is one-hot at the argmax (contract C5); draft rows are then never
        read."""
        return self.temperature == 0.0
