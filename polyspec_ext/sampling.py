"""The sampling parameters of one request, shared by every level of a chain (contract C1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch

from . import arguments
from .allow_masks import MaskSource, Words
from .validate import TEMPERATURE_MAX

Alternatives = list[tuple[int, float]]  # the likeliest ids of a token, with log-probabilities


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
    """`LogitsProcessors` of requests that come and go. Rows without any get their logits back. It
    is false while it changes the logits of no request.

    Args:
        last: applied to all rows, behind the processors of each.
    """

    def __init__(self, last: LogitsProcessors | None = None) -> None:
        self._of_row: dict[int, list[RowProcessor]] = {}
        self._last = last

    def add(self, row: int, processors: Sequence[RowProcessor]) -> None:
        """Set what changes the logits of request number `row`, in the order of application: rules
        (`LogitsRules`) before a mask of allowed tokens."""
        if processors:
            self._of_row[row] = list(processors)

    def remove(self, row: int) -> None:
        """Forget a request, if it is known."""
        self._of_row.pop(row, None)

    def __bool__(self) -> bool:
        """Return whether anything changes the logits of any request."""
        return bool(self._of_row) or self._last is not None

    @property
    def only_masks(self) -> bool:
        """Return whether `masks` gives all that it changes."""
        return self._last is None and all(
            len(row) == 1 and isinstance(row[0], MaskSource) for row in self._of_row.values()
        )

    def masks(self, prefix: Sequence[int], count: int, row: int) -> Sequence[Words | None]:
        """Return the allow-masks of a row as `GrammarMatcher.masks`; while `only_masks`."""
        for source in self._of_row.get(row, ()):
            return cast(MaskSource, source).masks(prefix, count)
        return [None] * count

    def forces(self, row: int) -> bool:
        """Return whether `forced` may have tokens for a row."""
        return any(hasattr(processor, "forced") for processor in self._of_row.get(row, ()))

    def forced(self, prefix: Sequence[int], most: int, row: int) -> list[int]:
        """Return tokens, at most `most`, of which each is the only one that a row allows behind
        `prefix` and those before it."""
        for processor in self._of_row.get(row, ()):
            forced = getattr(processor, "forced", None)
            if forced is not None:
                return cast(list[int], forced(prefix, most))
        return []

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Apply the processors of a row as `LogitsProcessors.apply`."""
        for processor in self._of_row.get(row, ()):
            logits = processor.apply(logits, prefix)
        return logits if self._last is None else self._last.apply(logits, prefix, row)


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


def processed_scores(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logits ``[e, V]`` after temperature and filters, float32: -inf where a token has no
    probability. Greedy logits stay as they are."""
    scores = logits.float()
    if sampling.greedy:
        return scores
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[1]:
        edge = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < edge, -float("inf"))
    if sampling.top_p < 1:  # tokens tied at the edge stay
        mass, order = scores.softmax(-1).sort(dim=-1, descending=True)
        kept = mass.cumsum(-1) - mass < sampling.top_p
        kept[:, 0] = True
        last = kept.sum(-1, keepdim=True) - 1
        edge = scores.gather(-1, order.gather(-1, last))
        scores = scores.masked_fill(scores < edge, -float("inf"))
    if sampling.min_p > 0:
        mass = scores.softmax(-1)
        least = sampling.min_p * mass.amax(-1, keepdim=True)
        scores = scores.masked_fill(mass < least, -float("inf"))
    return scores


def likeliest(logits: torch.Tensor, sampling: Sampling, count: int) -> list[Alternatives]:
    """Return of each row of processed logits ``[e, V]`` the `count` likeliest ids with their
    log-probabilities after temperature and filters, the lower id first of equally likely ones;
    fewer where no other has a probability. At temperature 0, where an id has all of it, they are
    those of temperature 1."""
    logprobs = processed_scores(logits, sampling).log_softmax(-1)
    edges = logprobs.topk(min(count, logprobs.shape[1])).values[:, -1:]
    likely = (logprobs >= edges) & ~logprobs.isneginf()
    alternatives = []
    for row, chosen in zip(logprobs, likely, strict=True):
        ids = chosen.nonzero()[:, 0]
        values, order = row[ids].sort(descending=True, stable=True)
        alternatives.append(list(zip(ids[order].tolist(), values.tolist(), strict=True))[:count])
    return alternatives
