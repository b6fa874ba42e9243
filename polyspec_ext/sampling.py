"""Sampling parameters of a request, shared by every level of a chain (contract C1); seeds of rows;
and allow-masks, a bit for each id that may come next, as computed by a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from . import _C, arguments
from .arguments import SEED_MAX, TEMPERATURE_MAX

Words = npt.NDArray[np.int32]  # an allow-mask, 32 ids per word
Alternatives = list[tuple[int, float]]  # the likeliest ids of a token, with log-probabilities


# ---- processors ----------------------------------------------------------------------------------


@runtime_checkable
class LogitsProcessors(Protocol):
    """Processors of logits before temperature and filters, on every level alike (contract C1)."""

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Return processed logits ``[k, V]``, a new tensor.

        Args:
            logits: ``[k, V]``; row i is for the token after ``prefix[: n - k + 1 + i]``.
            prefix: ``[n]`` int64, n >= k, prompt first, without padding.
            row: number of the request in its batch.
        """
        ...


class RowProcessor(Protocol):
    """A processor of the logits of a single request: a function of logits and prefix alone."""

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Return processed logits ``[k, V]``; arguments as for `LogitsProcessors.apply`."""
        ...


class MaskSource:
    """A `RowProcessor` that only forbids ids, by `masks`."""

    def masks(self, prefix: Sequence[int], count: int) -> list[Words | None]:
        """Return the allow-masks of `count` successive tokens (`GrammarMatcher.masks`)."""
        raise NotImplementedError


class RequestProcessors:
    """`LogitsProcessors` of a changing set of requests; `last` applies after the processors of each
    row. False in a boolean context without any processors."""

    def __init__(self, last: LogitsProcessors | None = None) -> None:
        self._of_row: dict[int, list[RowProcessor]] = {}
        self._last = last

    def add(self, row: int, processors: Sequence[RowProcessor]) -> None:
        """Set the processors of request number `row`, in the order of application: rules
        (`LogitsRules`) before an allow-mask."""
        if processors:
            self._of_row[row] = list(processors)

    def remove(self, row: int) -> None:
        """Remove the processors of a request, if it has any."""
        self._of_row.pop(row, None)

    def __bool__(self) -> bool:
        return bool(self._of_row) or self._last is not None

    @property
    def only_masks(self) -> bool:
        """Whether `masks` expresses all processors."""
        return self._last is None and all(
            len(row) == 1 and isinstance(row[0], MaskSource) for row in self._of_row.values()
        )

    def masks(self, prefix: Sequence[int], count: int, row: int) -> Sequence[Words | None]:
        """Return the allow-masks of a row as `GrammarMatcher.masks`; requires `only_masks`."""
        for source in self._of_row.get(row, ()):
            return cast(MaskSource, source).masks(prefix, count)
        return [None] * count

    def forces(self, row: int) -> bool:
        """Return whether `forced` may have tokens for a row."""
        return any(hasattr(processor, "forced") for processor in self._of_row.get(row, ()))

    def forced(self, prefix: Sequence[int], most: int, row: int) -> list[int]:
        """Return at most `most` tokens, each the only token that a row allows after `prefix` and
        the tokens before it."""
        for processor in self._of_row.get(row, ()):
            forced = getattr(processor, "forced", None)
            if forced is not None:
                return cast(list[int], forced(prefix, most))
        return []

    def forbidding(self, prefix: Sequence[int], row: int) -> dict[str, str]:
        """Return the rules of a row that forbid a token after `prefix`, each with its reason or "";
        none for a processor that does not say."""
        rules: dict[str, str] = {}
        for processor in self._of_row.get(row, ()):
            forbidding = getattr(processor, "forbidding", None)
            rules |= {} if forbidding is None else forbidding(prefix)
        return rules

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Apply the processors of a row as `LogitsProcessors.apply`."""
        for processor in self._of_row.get(row, ()):
            logits = processor.apply(logits, prefix)
        return logits if self._last is None else self._last.apply(logits, prefix, row)


# ---- distributions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request: temperature, then top-k, top-p and min-p. 0, 1.0 and 0.0
    mean off.

    Raises:
        TypeError: a parameter is no number; names it.
        ValueError: a parameter is out of range; names it, its range and its value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Checked as by `ps.sample`. `object.__setattr__`, because the dataclass is frozen.
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
        nucleus = mass.cumsum(-1) - mass < sampling.top_p
        nucleus[:, 0] = True
        last = nucleus.sum(-1, keepdim=True) - 1
        edge = scores.gather(-1, order.gather(-1, last))
        scores = scores.masked_fill(scores < edge, -float("inf"))
    if sampling.min_p > 0:
        mass = scores.softmax(-1)
        least = sampling.min_p * mass.amax(-1, keepdim=True)
        scores = scores.masked_fill(mass < least, -float("inf"))
    return scores


def likeliest(logits: torch.Tensor, sampling: Sampling, count: int) -> list[Alternatives]:
    """Return for each row of processed logits ``[e, V]`` the `count` likeliest ids with their
    log-probabilities after temperature and filters, the lower id first on ties; fewer if the other
    ids have probability 0. At temperature 0 the log-probabilities are of temperature 1, instead of
    a one-hot distribution."""
    logprobs = processed_scores(logits, sampling).log_softmax(-1)
    edges = logprobs.topk(min(count, logprobs.shape[1])).values[:, -1:]
    likely = (logprobs >= edges) & ~logprobs.isneginf()
    alternatives = []
    for row, chosen in zip(logprobs, likely, strict=True):
        ids = chosen.nonzero()[:, 0]
        values, order = row[ids].sort(descending=True, stable=True)
        alternatives.append(list(zip(ids[order].tolist(), values.tolist(), strict=True))[:count])
    return alternatives


# ---- seeds ---------------------------------------------------------------------------------------


def row_seeds(seed: int, count: int) -> list[int]:
    """Derive the seeds of `count` prompts from `seed`: row 0 has `seed` itself, row b the 64 bits
    of Philox4x32-10 keyed by (seed, position b, level 0, round 0, purpose 0).

    No draw has level 0, so a row's seed is independent of every draw. It does not depend on
    `count`: a batch of a single row is drawn as with ``ps.sample(..., seed=seed)``, further prompts
    do not change the rows before them, and row b alone is
    ``chain.generate(prompts[b], seed=ps.row_seeds(seed, b + 1)[b])``. Batches with different seeds
    have different seeds in every row, but for chance (2**-64 for a pair of rows).

    Args:
        seed: in [0, 2**64).
        count: number of rows, >= 0.

    Raises:
        TypeError, ValueError: an argument is no integer, or out of range.
    """
    seed = arguments.integer("seed", seed, SEED_MAX)
    rows = range(arguments.integer("count", count))
    return [_C.row_seed(seed, row) if row else seed for row in rows]


def fresh_seed() -> int:
    """Draw a seed from torch's CPU generator, which ``torch.manual_seed`` fixes."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
