"""Choose among several drafters while a chain runs, together with the windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import arguments
from .adaptive import Joint
from .base import RoundReport, WindowPolicy

_FORGETTING = 0.98  # weight of a round relative to the next
# Weight of the bound's bonus, as a share of the throughput: the tokens of a round deviate from
# their mean by about half of it, and with a much smaller bonus an unlucky start would exclude a
# drafter.
_CONFIDENCE = 0.5


class DrafterChoice:
    """A window policy that also chooses the active drafter: the one with the highest upper
    confidence bound of its throughput, in tokens per second of its latest rounds, so that every
    drafter is tried and improvements are noticed. Each drafter has a separate window policy, which
    sees only the rounds of that drafter.

    A batch has one active drafter; it may change before each `stay`-th round.

    Args:
        drafter: the `SwitchingDrafter` of the chain.
        policy: creates the window policy of a drafter. Default: `Joint`.
        stay: rounds of the target between choices, >= 1.

    Raises:
        TypeError, ValueError: an argument of another type or out of range.
    """

    def __init__(
        self,
        drafter: Any,
        policy: Callable[[], WindowPolicy] = Joint,
        *,
        stay: int = 4,
    ) -> None:
        if isinstance(drafter, type) or not getattr(drafter, "members", None):
            raise TypeError(
                f"drafter: expected a SwitchingDrafter, given {arguments.shown(drafter)}"
            )
        arguments.function("policy", policy)
        self.drafter, self.stay = drafter, arguments.integer("stay", stay, low=1)
        count = len(drafter.members)
        self.policies = [policy() for _ in range(count)]
        for instance in self.policies:
            arguments.instance("policy", instance, WindowPolicy, none=False)
        self._rounds, self._tokens, self._seconds = ([0.0] * count for _ in range(3))
        self._left = self.stay
        self._first: int | None = None  # the request that reports first in its batch
        self._at_work: dict[int, int] = {}  # by request: drafter of the latest round
        self._windows: dict[int, Sequence[int]] = {}  # by request: windows of the first round

    def next(self, report: RoundReport) -> Sequence[int]:
        """Choose windows (`WindowPolicy.next`)."""
        begins = report.committed == 0 and not report.steps
        if begins:
            self._windows[report.request] = list(report.windows)
            self._at_work.pop(report.request, None)
        else:
            self._learn(report)
        if begins and report.request == 0:
            self._first = 0
        elif self._leads(report):
            self._left -= 1
            if self._left <= 0:
                self.drafter.active, self._left = self._best(), self.stay
        # The policy of the active drafter does not see rounds of another drafter: after a change
        # the request begins anew for it.
        at: int = self.drafter.active
        number = report.request
        if self._at_work.get(number) != at:
            windows = self._windows.get(number, report.windows)
            report = RoundReport(number, windows, report.text, 0, batch=report.batch)
        self._at_work[number] = at
        return self.policies[at].next(report)

    def _leads(self, report: RoundReport) -> bool:
        if self._first is None or report.request <= self._first:
            self._first = report.request
        return report.request == self._first

    def _learn(self, report: RoundReport) -> None:
        at = self.drafter.active
        seconds = sum(step.seconds for step in report.steps)
        drafted = any(step.level > 1 and step.tokens for step in report.steps)
        if seconds <= 0 or not drafted:
            return  # plain decoding has no information about a drafter
        for table in (self._rounds, self._tokens, self._seconds):
            table[:] = [_FORGETTING * value for value in table]
        self._rounds[at] += 1
        self._tokens[at] += report.committed
        self._seconds[at] += seconds

    def _best(self) -> int:
        pairs = zip(self._tokens, self._seconds, strict=True)
        speeds = [tokens / seconds if seconds > 0 else 0.0 for tokens, seconds in pairs]
        if not any(self._seconds):
            active: int = self.drafter.active
            return active
        bonus = _CONFIDENCE * max(speeds) * math.sqrt(math.log(1 + sum(self._rounds)))

        def bound(at: int) -> float:
            rounds = self._rounds[at]
            return speeds[at] + bonus / math.sqrt(rounds) if rounds >= 1e-3 else math.inf

        return max(range(len(speeds)), key=bound)
