"""The policies of ``polyspec/policy.hpp``, by name, and a choice among several drafters;
and the recorder of the steps that they read.

All but `Fixed` fall back to plain decoding while speculation loses time (`Adaptive`). Windows
chosen by measured times differ between runs, and so does the text that a seed gives; its
distribution does not, nor do greedy texts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .. import arguments
from .._C import PolicyKind, PolicyOptions
from .._C import WindowPolicy as _Native
from ..stats import Stats, StatsRecorder
from . import NAMES, RoundReport, StepReport, WindowPolicy

_FORGETTING = 0.98  # weight of a round relative to the next
# Weight of the bound's bonus, as a share of the throughput: the tokens of a round deviate from
# their mean by about half of it, and with a much smaller bonus an unlucky start would exclude a
# drafter.
_CONFIDENCE = 0.5


@dataclass(eq=False)
class Adaptive:
    """Base of the policies, with the fall-back to plain decoding. A policy serves one chain and
    keeps its estimates from request to request; a copy has none.

    The rows of a batch fall back to plain decoding together, because the widest row determines the
    time of a step. `Online` and `Joint` choose the same windows for all rows, by their mean
    acceptance.

    Args:
        max_windows: upper bounds of the windows of level 1 ... n-1. None: 16 for the drafter, 32
            above.
        guard: fall back to plain decoding once rounds have lost `guard_loss` plain passes of the
            target against it; earlier gains count up to twice that (a CUSUM with a floor). Try
            speculation again, for three rounds, after `guard_hold` tokens, and after twice as many
            with each trial that loses, up to 32 times. `Online` and `Joint` begin with one plain
            round and then a window of two tokens at each level; in a batch of one row first.
        guard_loss: > 0, in plain passes.
        guard_hold: >= 1, in tokens.
        guard_share: > 0; the losses of speculation and of the next trial are at most this share of
            the tokens decoded plainly since the fall-back.

    Raises:
        TypeError, ValueError: an option of another type or out of range.
    """

    name: ClassVar[str] = ""
    _kind: ClassVar[PolicyKind]

    max_windows: Sequence[int] | None = field(default=None, kw_only=True)
    guard: bool = field(default=True, kw_only=True)
    guard_loss: float = field(default=6.0, kw_only=True)
    guard_hold: int = field(default=48, kw_only=True)
    guard_share: float = field(default=0.02, kw_only=True)

    def __post_init__(self) -> None:
        self._native: _Native | None = None
        # Options are checked here, so that no request fails by them; their ranges by the library.
        windows = [1]
        if self.max_windows is not None:
            windows = self.max_windows = [
                arguments.integer("max_windows", window, arguments.SIZE_MAX)
                for window in arguments.row_integers("max_windows", self.max_windows)
            ]
            if not windows:
                raise ValueError(
                    "max_windows: expected one for each level but the last, given none"
                )
        for entry in fields(self):
            name, value, default = entry.name, getattr(self, entry.name), entry.default
            if isinstance(default, bool):
                value = arguments.flag(name, value)
            elif isinstance(default, int):
                value = arguments.integer(name, value, arguments.SIZE_MAX)
            elif isinstance(default, float):
                value = arguments.real(name, value, sys.float_info.max)
            setattr(self, name, value)
        _made(self, windows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}

    def next(self, report: RoundReport) -> Sequence[int]:
        """Choose windows (`WindowPolicy.next`), beginning with the windows of the first report."""
        if self._native is None:
            self._native = _made(self, report.windows)
        begins = report.committed == 0 and not report.steps
        text = report.text if begins else report.text[len(report.text) - report.committed :]
        return self._native.next(report.request, begins, report.steps, text, report.batch)

    def reset(self) -> None:
        """Discard all estimates."""
        self._native = None


def _made(policy: Adaptive, windows: Sequence[int]) -> _Native:
    options = PolicyOptions()
    options.kind = policy._kind
    options.windows = list(windows)
    for entry in fields(policy):
        value = getattr(policy, entry.name)
        if value is not None:
            setattr(options, entry.name, value)
    return _Native(options)


@dataclass(eq=False)
class Fixed(Adaptive):
    """Constant windows: the chain's. Without a guard the policy has no effect."""

    name, _kind = "fixed", PolicyKind.FIXED
    guard: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Online(Adaptive):
    """The window of the highest throughput by equations 1 and 2 of Liu, Park and Shen (ACL 2025),
    level by level from the drafter upwards.

    Args:
        history: number of verifications in the acceptance estimate of a level (h), >= 1.
        max_acceptance: the estimate's cap (Acc_max), in (0, 1).
    """

    name, _kind = "online", PolicyKind.ONLINE
    history: int = 64
    max_acceptance: float = 0.98


@dataclass(eq=False)
class CachedFsm(Adaptive):
    """A table from the last tokens to the best window after the same tokens before. Without an
    entry the window grows by 1 after a fully accepted block, and shrinks by 1 after a block of
    which less than half was accepted.

    Args:
        ngram: tokens of a key, 1 to 8.
    """

    name, _kind = "cached-fsm", PolicyKind.CACHED_FSM
    ngram: int = 3


@dataclass(eq=False)
class Joint(Adaptive):
    """All windows jointly, by the renewal model of the chain and estimates of every level's
    acceptance at every position of a block.

    Args:
        forgetting: weight of a verification relative to the next, in (0, 1].
        max_acceptance: the estimates' cap, in (0, 1).
    """

    name, _kind = "joint", PolicyKind.JOINT
    forgetting: float = 0.9
    max_acceptance: float = 0.98


POLICIES: dict[str, type[Adaptive]] = dict(
    zip(NAMES, (Fixed, Online, CachedFsm, Joint), strict=True)
)


def named(name: str) -> Adaptive:
    """Return the policy of a name with its default options.

    Raises:
        TypeError, ValueError: no policy has the name.
    """
    if not isinstance(name, str) or name not in POLICIES:
        wrong = ValueError if isinstance(name, str) else TypeError
        shown = arguments.shown(name)
        raise wrong(f"policy: expected one of {', '.join(POLICIES)}, given {shown}")
    return POLICIES[name]()


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
        elif self._first is None or report.request <= self._first:
            self._first = report.request
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
        if not any(self._seconds):
            return int(self.drafter.active)
        pairs = zip(self._tokens, self._seconds, strict=True)
        speeds = [tokens / seconds if seconds > 0 else 0.0 for tokens, seconds in pairs]
        bonus = _CONFIDENCE * max(speeds) * math.sqrt(math.log(1 + sum(self._rounds)))

        def bound(at: int) -> float:
            rounds = self._rounds[at]
            return speeds[at] + bonus / math.sqrt(rounds) if rounds >= 1e-3 else math.inf

        return max(range(len(speeds)), key=bound)


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
