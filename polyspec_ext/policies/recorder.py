"""What the steps of a round were, row by row, out of what the statistics are told."""

from __future__ import annotations

from collections.abc import Sequence

from ..stats import Stats, StatsRecorder
from .base import StepReport


class RoundRecorder(StatsRecorder):
    """Statistics, and beside them the steps of the round under way.

    Args:
        total: of the batch.
        rows: of each request; of a single one it is the total.
    """

    def __init__(self, total: Stats, rows: Sequence[Stats]) -> None:
        super().__init__(total)
        self._number = {id(stats): number for number, stats in enumerate(rows)}
        self._levels = len(total.levels)
        self._steps: list[list[StepReport]] = [[] for _ in rows]
        # Request, tokens and accepted ones without a tail, tokens with it.
        self._open: list[tuple[int, int, int, int]] = []

    def take(self, request: int) -> Sequence[StepReport]:
        """The steps of a row since the last call."""
        steps, self._steps[request] = self._steps[request], []
        return steps

    def proposed(self, row: Stats, tokens: int) -> None:
        super().proposed(row, tokens)
        self._open.append((self._number[id(row)], tokens, 0, tokens))

    def verified(
        self,
        row: Stats,
        index: int,
        drafted: int,
        accepted: int,
        emitted: int,
        of_tail: int = 0,
    ) -> None:
        super().verified(row, index, drafted, accepted, emitted, of_tail)
        # A tail's tokens say nothing of the level below, whose acceptance policies estimate.
        own = drafted - of_tail
        self._open.append((self._number[id(row)], own, min(accepted, own), drafted))

    def spent(self, rows: Sequence[Stats], index: int, seconds: float, passes: int) -> None:
        super().spent(rows, index, seconds, passes)
        # (A pass that only reads what a level has missed is no step.)
        level = index + 1 if index >= 0 else self._levels
        width, batch = max((one[3] for one in self._open), default=0), len(self._open)
        for place, (request, tokens, accepted, _) in enumerate(self._open):
            step = StepReport(level, tokens, accepted, width, batch, seconds, place > 0)
            self._steps[request].append(step)
        self._open.clear()
