"""What a chain gives back: all tokens at once, or each as it is committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .runtime.batch import Batch
from .stats import Stats


@dataclass(slots=True)
class Output:
    """What `Chain.generate` returns.

    Attributes:
        sequences: ``[B, N]`` int64, prompts and new tokens, short rows padded at their end.
        stats: of the whole batch.
        requests: the statistics of each row. Times are those of the passes it took part in.
        logprobs: of the new tokens of each row, under the target's processed distribution.
        seeds: of each row; as `seed` of the same call they give the same tokens. Where no row
            samples, those of seed 0.
    """

    sequences: torch.Tensor
    stats: Stats
    requests: list[Stats] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


class Stream:
    """Iterator over the new tokens of one prompt, as the target commits them.

    Args:
        batch: of one row.

    Raises:
        RequestError: of ``next``: a row of logits has no distribution.
        RuntimeError: of ``next``: the chain has begun another batch since, or this one failed.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._ready: list[int] = []
        self._next = 0

    @property
    def stats(self) -> Stats:
        """Up to date after each token."""
        return self.batch.stats

    @property
    def seeds(self) -> list[int]:
        """As `Output.seeds`: one."""
        return self.batch.seeds

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next == len(self._ready):
            committed = self.batch.advance()
            if not committed:
                raise StopIteration
            self._ready, self._next = committed[0][1], 0
        self._next += 1
        return self._ready[self._next - 1]
