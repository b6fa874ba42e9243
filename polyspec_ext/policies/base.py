"""The contract of a window policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class RoundReport(NamedTuple):
    """What a policy may look at when it chooses the windows of a row's next round of the target:
    what is over, never the draws to come (contract C2).

    Attributes:
        request: number of the row in its batch.
        windows: of level 1 ... n-1 in the round that is over.
        text: prompt and committed tokens.
        committed: tokens that the round has committed; 0 before the first.
    """

    request: int
    windows: Sequence[int]
    text: Sequence[int]
    committed: int


@runtime_checkable
class WindowPolicy(Protocol):
    """Chooses windows before each round of the target."""

    def next(self, report: RoundReport) -> Sequence[int]:
        """Windows of level 1 ... n-1 for the row's next round, each >= 0. A window of 0 lets the
        level decode alone; it may grow again."""
        ...
