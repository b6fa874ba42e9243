"""Choose among several drafters while a chain runs, together with the windows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from .. import arguments
from .adaptive import Joint
from .base import RoundReport, WindowPolicy


@runtime_checkable
class Switch(Protocol):
    """A drafter with interchangeable members (`drafters.SwitchingDrafter`)."""

    active: int

    @property
    def members(self) -> Sequence[object]: ...


class DrafterChoice:
    """A window policy that also chooses the active drafter: the one with the highest upper
    confidence bound of its throughput, in tokens per second of its latest rounds, so that every
    drafter is tried and improvements are noticed. Each drafter has a separate window policy, which
    sees only the rounds of that drafter.

    A batch has one active drafter; it may change before each `stay`-th round.

    Args:
        drafter: the drafter of the chain.
        policy: creates the window policy of a drafter. Default: `Joint`.
        stay: rounds of the target between choices, >= 1.
        forgetting: weight of a round relative to the next, in (0, 1].
        confidence: weight of the bound's bonus, >= 0, as a share of the throughput. (The tokens of
            a round deviate from their mean by about half of it; with a much smaller bonus an
            unlucky start would exclude a drafter.)

    Raises:
        TypeError, ValueError: an argument of another type or out of range.
    """

    def __init__(
        self,
        drafter: Switch,
        policy: Callable[[], WindowPolicy] = Joint,
        *,
        stay: int = 4,
        forgetting: float = 0.98,
        confidence: float = 0.5,
    ) -> None:
        arguments.instance("drafter", drafter, Switch, none=False)
        arguments.function("policy", policy)
        stay = arguments.integer("stay", stay, low=1)
        forgetting = arguments.real("forgetting", forgetting)
        if forgetting == 0:
            raise ValueError("forgetting: expected a number in (0, 1], given 0")
        confidence = arguments.real("confidence", confidence, sys.float_info.max)
        self.drafter = drafter
        self.stay, self.forgetting, self.confidence = stay, forgetting, confidence
        count = len(drafter.members)
        self.policies = [policy() for _ in range(count)]
        for instance in self.policies:
            arguments.instance("policy", instance, WindowPolicy, none=False)
        self._rounds, self._tokens, self._seconds = ([0.0] * count for _ in range(3))
        self._left = stay
        self._first: int | None = None  # the request that reports first in its batch
        self._at_work: dict[int, int] = {}  # by request: drafter of the latest round
        self._windows: dict[int, Sequence[int]] = {}  # by request: windows of the first round

    def throughput(self) -> list[float]:
        """Return tokens per second of each drafter; NaN before its first round."""
        pairs = zip(self._tokens, self._seconds, strict=True)
        return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]

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
        at, number = self.drafter.active, report.request
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
            table[:] = [self.forgetting * value for value in table]
        self._rounds[at] += 1
        self._tokens[at] += report.committed
        self._seconds[at] += seconds

    def _best(self) -> int:
        speeds, total = self.throughput(), sum(self._rounds)
        known = [speed for speed in speeds if not math.isnan(speed)]
        if not known:
            return self.drafter.active
        bonus = self.confidence * max(known) * math.sqrt(math.log(1 + total))

        def bound(at: int) -> float:
            if math.isnan(speeds[at]) or self._rounds[at] < 1e-3:
                return math.inf
            return speeds[at] + bonus / math.sqrt(self._rounds[at])

        return max(range(len(speeds)), key=bound)
