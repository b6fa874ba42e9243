"""Policies that choose windows while a chain runs: their contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from .. import rooms

if TYPE_CHECKING:
    POLICIES = rooms.adaptive.POLICIES
    Adaptive = rooms.adaptive.Adaptive
    CachedFsm = rooms.adaptive.CachedFsm
    DrafterChoice = rooms.adaptive.DrafterChoice
    Fixed = rooms.adaptive.Fixed
    Joint = rooms.adaptive.Joint
    Online = rooms.adaptive.Online
    named = rooms.adaptive.named

__all__ = [
    "POLICIES", "Adaptive", "CachedFsm", "DrafterChoice", "Fixed", "Joint", "Online", "RoundReport",
    "StepReport", "WindowPolicy", "named",
]  # fmt: skip

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


def __getattr__(name: str) -> Any:  # imported when first used
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(rooms.adaptive, name)
