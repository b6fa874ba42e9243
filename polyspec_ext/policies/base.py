"""The contract of policies, which choose windows while a chain runs, and the recorder of the steps
that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..stats import Stats, StatsRecorder

NAMES = ("fixed", "online", "cached-fsm", "joint")  # of `adaptive.POLICIES`


class StepReport(NamedTuple):
    """Report of one step of a row.

    Attributes:
        level: 1 ... n; level n drafts, the others verify.
        tokens: draft tokens of this row, verified or drafted, without the tail of a block; for a
            tree the depth of its paths.
        accepted: accepted draft tokens.
        width: maximum tokens of any row in the step, which determines its time.
        batch: number of rows in the step.
        seconds: wall time of the step for all rows; 0: not measured.
        repeated: another row's report has the same time. In a batch of one: the level spent the
            time reading committed tokens that it had missed.
    """

    level: int
    tokens: int
    accepted: int
    width: int
    batch: int
    seconds: float
    repeated: bool = False


class RoundReport(NamedTuple):
    """Report of a row's last round, by which a policy chooses the windows of the next round of the
    target. It has no information about draws to come (contract C2).

    Attributes:
        request: number of the row in its batch.
        windows: windows of level 1 ... n-1 in the last round.
        text: prompt and committed tokens.
        committed: tokens committed by the last round; 0 before the first.
        steps: steps of the row in the last round, in order.
        batch: number of rows in the next round. Each has a report, and the widest row determines
            the time of a step.
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
        """Return the windows of level 1 ... n-1 for the row's next round, each >= 0. A level with
        a window of 0 decodes plainly in that round."""
        ...


class RoundRecorder(StatsRecorder):
    """Statistics of a batch, and the steps of the current round.

    Args:
        total: statistics of the batch.
        timed: report the seconds of steps; else 0, as not measured.
    """

    def __init__(self, total: Stats, timed: bool = True) -> None:
        super().__init__(total)
        self._timed = timed
        self._levels = len(total.levels)
        self._steps: dict[int, list[StepReport]] = {}
        # By level below the target: seconds of reading prompts and missed tokens since the last
        # round, which all rows wait for.
        self._reading: dict[int, float] = {}

    def take(self, row: Stats) -> Sequence[StepReport]:
        """Return and clear the steps of a row, identified by its statistics."""
        return self._steps.pop(id(row), [])

    def prefilled(self, index: int, seconds: float, row: Stats | None = None) -> None:
        super().prefilled(index, seconds, row)
        self._add_reading(index, seconds)

    def spent(self, index: int, seconds: float, passes: int) -> None:
        super().spent(index, seconds, passes)
        self._add_reading(index, seconds)

    def _add_reading(self, index: int, seconds: float) -> None:
        if index > 0 and self._timed:
            self._reading[index + 1] = self._reading.get(index + 1, 0.0) + seconds

    def drafted(
        self,
        entries: Sequence[Sequence[int]],
        seconds: float,
        passes: int,
        nodes: Sequence[int] | None = None,
    ) -> None:
        super().drafted(entries, seconds, passes, nodes)
        drawn = [entry[3] for entry in entries] if nodes is None else nodes
        self._note(self._levels, entries, [(n, 0, n) for n in drawn], seconds)

    def verified(self, index: int, entries: Sequence[Sequence[int]], seconds: float) -> None:
        super().verified(index, entries, seconds)
        rows = []
        for tokens, _, accepted, _, _, _, of_tail in entries:
            # Policies estimate the acceptance of the level below, which did not see a tail.
            drafted = tokens - of_tail
            rows.append((drafted, min(accepted, drafted), tokens))
        self._note(index + 1, entries, rows, seconds)

    def _note(
        self,
        level: int,
        entries: Sequence[Sequence[int]],
        rows: Sequence[tuple[int, int, int]],
        seconds: float,
    ) -> None:
        """Record a step of the active rows: tokens and accepted tokens without a tail, and tokens
        with it."""
        seconds = seconds if self._timed else 0.0
        took = [at for at, entry in enumerate(entries) if entry[0] >= 0]
        width = max((rows[at][2] for at in took), default=0)
        for number, at in enumerate(took):
            tokens, accepted, _ = rows[at]
            step = StepReport(level, tokens, accepted, width, len(took), seconds, number > 0)
            self._steps.setdefault(id(self._rows[at]), []).append(step)
        if level == 1:  # the round ends
            reading = [
                StepReport(n, 0, 0, 0, 1, s, True) for n, s in self._reading.items() if s > 0
            ]
            for at in took:
                self._steps[id(self._rows[at])][:0] = reading
            self._reading.clear()
