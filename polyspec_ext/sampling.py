"""The sampling parameters of one request, shared by every level of a chain (contract C1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from . import arguments
from .validate import TEMPERATURE_MAX


@runtime_checkable
class LogitsProcessors(Protocol):
    """Changes logits before temperature and filters make a distribution of them, on every level
    alike (contract C1)."""

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Processed logits ``[k, V]``, a new tensor.

        Args:
            logits: ``[k, V]``; row i is of the token behind ``prefix[: n - k + 1 + i]``.
            prefix: ``[n]`` int64, n >= k, prompt first, without padding.
            row: number of the request in its batch.
        """
        ...


class RowProcessor(Protocol):
    """Changes the logits of one request, as `LogitsProcessors` those of several: a function of
    logits and prefix alone."""

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Return processed logits ``[k, V]``; arguments as of `LogitsProcessors.apply`."""
        ...


class RequestProcessors:
    """`LogitsProcessors` of requests that come and go. Rows without any get their logits back."""

    def __init__(self) -> None:
        self._of_row: dict[int, list[RowProcessor]] = {}

    def add(self, row: int, processors: Sequence[RowProcessor]) -> None:
        """Set what changes the logits of request number `row`, in the order of application: rules
        (`LogitsRules`) before a mask of allowed tokens."""
        self._of_row[row] = list(processors)

    def remove(self, row: int) -> None:
        """Forget a request, if it is known."""
        self._of_row.pop(row, None)

    def applies(self, row: int) -> bool:
        """Return whether anything changes the logits of request number `row`."""
        return bool(self._of_row.get(row))

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Apply the processors of a row as `LogitsProcessors.apply`."""
        for processor in self._of_row.get(row, ()):
            logits = processor.apply(logits, prefix)
        return logits


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become a distribution: temperature, then top-k, top-p and min-p. 0, 1.0 and 0.0
    mean off.

    Raises:
        TypeError: a parameter is no number; names it.
        ValueError: a parameter is out of range; names it, what is allowed and what was given.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Checked as by `ps.sample`. A frozen dataclass is set like this before it is handed out.
        for name, value in (
            ("temperature", arguments.real("temperature", self.temperature, TEMPERATURE_MAX)),
            ("top_k", arguments.integer("top_k", self.top_k)),
            ("top_p", arguments.real("top_p", self.top_p)),
            ("min_p", arguments.real("min_p", self.min_p)),
        ):
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot at the argmax (contract C5); draft rows are then
        never read."""
        return self.temperature == 0.0
