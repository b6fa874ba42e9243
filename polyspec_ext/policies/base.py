"""The contract of a window policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class StepReport(NamedTuple):
    """One step that a row took part in.

    Attributes:
        level: 1 ... n; n drafted, the others verified.
        tokens: verified or drafted in this row, without the tail of a block; of a tree, the depth
            of its paths.
        accepted: of those verified.
        width: the most tokens of any row in the step, which its time depends on.
        batch: rows that took part.
        seconds: wall time of the step, for all its rows; 0: not measured.
        repeated: the time was told with another row's report. Of a row alone: it passed while the
            level read tokens that it had missed.
    """

    level: int
    tokens: int
    accepted: int
    width: int
    batch: int
    seconds: float
    repeated: bool = False


class RoundReport(NamedTuple):
    """What a policy may look at when it chooses the windows of a row's next round of the target:
    what is over, never the draws to come (contract C2).

    Attributes:
        request: number of the row in its batch.
        windows: of level 1 ... n-1 in the round that is over.
        text: prompt and committed tokens.
        committed: tokens that the round has committed; 0 before the first.
        steps: of that round in which the row took part, in order.
        batch: rows that take the next round together, this one among them; each is told of once
            before it, and a step takes as long as its widest row wants.
    """

    request: int
    windows: Sequence[int]
    text: Sequence[int]
    committed: int
    steps: Sequence[StepReport] = ()
    batch: int = 1


@runtime_checkable
class WindowPolicy(Protocol):
    """Chooses windows before each round of the target."""

    def next(self, report: RoundReport) -> Sequence[int]:
        """Windows of level 1 ... n-1 for the row's next round, each >= 0. A window of 0 lets the
        level decode alone; it may grow again."""
        ...
