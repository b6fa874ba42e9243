"""Policies that choose windows while a chain runs: the contract, and those of the library
(``polyspec/policy.hpp``), by name and with their options.

All but `Fixed` fall back to plain decoding while speculation loses, by the seconds of the rounds:
see `Adaptive`. Windows that follow measured times differ from run to run, and with them which of
the equally distributed texts a seed gives; greedy texts stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from .. import arguments
from .._C import PolicyKind, PolicyOptions
from .._C import WindowPolicy as _Native
from ..validate import SEED_MAX


class StepReport(NamedTuple):
    """Report of a step that a row took part in.

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
    """Report by which a policy chooses the windows of a row's next round of the target:
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


@dataclass(eq=False)
class Adaptive:
    """What the policies share. It serves one chain, and goes on from one request to the next with
    what it has learned; a copy begins anew.

    The rows of a batch fall back to plain decoding together, by what such a batch takes: their
    steps take as long as the widest row wants. `Online` and `Joint` choose the same windows for all
    of them, by what their rows accept on average.

    Args:
        max_windows: of level 1 ... n-1, never exceeded. None: 16 for the drafter, 32 above.
        guard: fall back to plain decoding once rounds have lost `guard_loss` plain passes of the
            target against it, of what was won before twice that at most (a CUSUM with a floor),
            and try again, for three rounds, after `guard_hold` tokens, twice as many after each
            trial that loses, up to 32 times. `Online` and `Joint` decode one round plainly at
            first, and then ask for two tokens of each level.
        guard_loss: > 0, in plain passes.
        guard_hold: >= 1, in tokens.
        guard_share: > 0. There is no trial before what speculation has lost, and what the next one
            is likely to, are this share of the tokens decoded plainly since.

    Raises:
        TypeError, ValueError: an option of another kind or out of its range.
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
        # Whatever is out of range is said here and not in the middle of a text.
        if self.max_windows is not None:
            self.max_windows = [
                arguments.integer("max_windows", one, arguments.SIZE_MAX)
                for one in arguments.row_integers("max_windows", self.max_windows)
            ]
            if not self.max_windows:
                raise ValueError(
                    "max_windows: expected one for each level but the last, given none"
                )
        for one in fields(self):
            setattr(self, one.name, _plain(one.name, getattr(self, one.name), one.default))
        _made(self, [1] * (1 if self.max_windows is None else len(self.max_windows)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}

    def next(self, report: RoundReport) -> Sequence[int]:
        """Choose windows (`WindowPolicy.next`). The windows of the first report are tried first."""
        if self._native is None:
            self._native = _made(self, report.windows)
        begins = report.committed == 0 and not report.steps
        text = report.text if begins else report.text[len(report.text) - report.committed :]
        return self._native.next(report.request, begins, report.steps, text, report.batch)

    def reset(self) -> None:
        """Forget what was learned."""
        self._native = None


def _made(policy: Adaptive, windows: Sequence[int]) -> _Native:
    options = PolicyOptions()
    options.kind = policy._kind
    options.windows = list(windows)
    for one in fields(policy):
        value = getattr(policy, one.name)
        if value is not None:
            setattr(options, one.name, value)
    return _Native(options)


def _plain(name: str, value: Any, default: Any) -> Any:
    """Return an option of the kind of its default; the library checks its range."""
    if isinstance(default, bool):
        return arguments.flag(name, value)
    if isinstance(default, int):
        return arguments.integer(name, value, SEED_MAX if name == "seed" else arguments.SIZE_MAX)
    if isinstance(default, float):
        return arguments.real(name, value, sys.float_info.max)
    return value


@dataclass(eq=False)
class Fixed(Adaptive):
    """The chain's own windows. Without a guard it is the chain as it is."""

    name, _kind = "fixed", PolicyKind.FIXED
    guard: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class Online(Adaptive):
    """The window of the highest throughput by equations 1 and 2 of Liu, Park and Shen (ACL 2025),
    level by level from the drafter upwards.

    Args:
        history: verifications of a level that its acceptance is estimated from (h), >= 1.
        max_acceptance: the estimate's cap (Acc_max), in (0, 1).
    """

    name, _kind = "online", PolicyKind.ONLINE
    history: int = 64
    max_acceptance: float = 0.98


@dataclass(eq=False)
class CachedFsm(Adaptive):
    """A table from the last tokens to the window that fitted there last; elsewhere one up after a
    block that was accepted whole, one down after one of which less than half was.

    Args:
        ngram: tokens of a key, 1 to 8.
    """

    name, _kind = "cached-fsm", PolicyKind.CACHED_FSM
    ngram: int = 3


@dataclass(eq=False)
class Joint(Adaptive):
    """All windows together, by the renewal model of the chain, from estimates of every level's
    acceptance at every position of a block.

    Args:
        forgetting: weight of a verification relative to the one after it, in (0, 1].
        max_acceptance: the estimates' cap, in (0, 1).
    """

    name, _kind = "joint", PolicyKind.JOINT
    forgetting: float = 0.9
    max_acceptance: float = 0.98


POLICIES: dict[str, type[Adaptive]] = {
    kind.name: kind for kind in (Fixed, Online, CachedFsm, Joint)
}


def named(name: str) -> Adaptive:
    """Return the policy of that name with its default options.

    Raises:
        TypeError, ValueError: there is none.
    """
    if not isinstance(name, str) or name not in POLICIES:
        wrong = ValueError if isinstance(name, str) else TypeError
        given = arguments.shown(name)
        raise wrong(f"policy: expected one of {', '.join(POLICIES)}, given {given}")
    return POLICIES[name]()
