"""What a chain costs per token, exactly, where acceptances are independent of each other: a renewal
process whose cycles are the rounds of the target.

The chain is the engine's (`runtime.plan`, ``polyspec/round_state.hpp``): level i waits until its
window is full or its bounded number of blocks has come; a verification of m tokens that accepts j
hands j + 1 up; what is pending can overshoot the window; and what a level above rejects is lost. A
level reads, beside the tokens that are pending for it, those that it has not read yet (``unread``):
its own last token and the bonus of every level above it.

Acceptances may be one number per level (an endless text, its steady state), or be given at every
position of recorded texts. Along a text drawn from the target's distribution p, a token that was
tested was accepted with probability min(1, q/p) at that very token, whatever windows the chain had
(its text does not depend on them, contract C2), so such a replay is exact for two levels. For more,
the levels below are taken to accept as they would along the same text, also behind a token that the
target rejects.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .lengths import Floats

_Ints = NDArray[np.int64]
_Lags = tuple[int, ...]
_TINY = 1e-14  # states less likely than this are left out


class PassSeconds(Protocol):
    """Seconds of the steps of a chain of n levels."""

    def verify(self, level: int, pending: int, unread: int) -> float:
        """Level `level` verifies `pending` tokens, in a pass that reads `unread` more; 1 at
        least."""
        ...

    def draft(self, tokens: int, unread: int) -> float:
        """Level n is asked for `tokens`, of which the first pass reads `unread`."""
        ...


@dataclass(frozen=True)
class ConstantSeconds:
    """A pass of M_i takes T_i whatever it reads, and M_n one pass for each token: the papers' view.

    Args:
        seconds: T_1 ... T_n.
    """

    seconds: Sequence[float]

    def verify(self, level: int, pending: int, unread: int) -> float:
        return self.seconds[level - 1]

    def draft(self, tokens: int, unread: int) -> float:
        return tokens * self.seconds[-1]


class Proposals(NamedTuple):
    """What a drafter proposes that is no model: its number of tokens differs from place to place.

    Attributes:
        accept: ``[P, K]``, the probability that the level above accepts token j of a proposal at
            position p, if those before it are accepted.
        counts: ``[P]``, tokens that it has to propose there; at most K.
    """

    accept: Floats
    counts: _Ints


@dataclass(frozen=True)
class Acceptance:
    """How likely each level accepts what comes from below.

    Attributes:
        levels: for level 1 ... n-1, ``[P]``: the probability that it accepts a token at position p,
            if those before it in the block are. P = 1: at any position of an endless text.
        remaining: ``[P]``, tokens left of each text from position p on, p itself included; texts
            stand one behind the other. None: endless.
        proposals: takes the place of the last of `levels`.
    """

    levels: tuple[Floats, ...]
    remaining: _Ints | None = None
    proposals: Proposals | None = None

    @classmethod
    def constant(cls, *levels: float) -> Acceptance:
        """The same everywhere: a_1 ... a_{n-1}."""
        return cls(tuple(np.array([a], np.float64) for a in levels))


@dataclass(frozen=True)
class Expectation:
    """Expected numbers of one round of the target, or of recorded texts.

    Attributes:
        rounds: ``[X]`` by text; [1.0] for an endless one.
        tokens: ``[X]``, committed.
        steps: ``[X, n]``, verifications of level 1 ... n-1 and drafts of level n.
        seconds: ``[X, n]``, spent in them.
        round_seconds: of one round of a batch, all of them together.
        verified: ``[n - 1]``, tokens verified per round by level 1 ... n-1.
        batch: rows.
    """

    rounds: Floats
    tokens: Floats
    steps: Floats
    seconds: Floats
    round_seconds: float
    verified: Floats
    batch: int = 1

    @property
    def length(self) -> float:
        """Tokens committed per round of the target; tau."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch * self.length / self.round_seconds

    def emitted(self, level: int) -> float:
        """Tokens handed up per verification of `level`; L_i for the target."""
        if level == 1:
            return self.length
        counts = self.steps.sum(0)
        above = float(self.verified[level - 2] * self.rounds.sum())
        return above / float(counts[level - 1]) if counts[level - 1] else float("nan")


class _Steps(NamedTuple):
    level: int
    part: Floats  # [P] probability that it is done
    seconds: Floats  # [P] expected
    verified: Floats  # [P] expected tokens


_Outcomes = dict[tuple[int, _Lags], Floats]
_Log = dict[tuple[int, ...], _Steps]


class _Chain:
    def __init__(
        self,
        windows: Sequence[int],
        rounds: Sequence[int],
        acceptance: Acceptance,
        seconds: PassSeconds,
    ) -> None:
        self.windows, self.rounds, self.seconds = windows, rounds, seconds
        self.levels = len(windows) + 1
        self.accept, self.proposals = acceptance.levels, acceptance.proposals
        self.remaining = acceptance.remaining
        self.places = 1 if self.remaining is None else len(self.remaining)
        self.block = functools.cache(self._block)
        self.shifted = functools.cache(self._shifted)

    def ahead(self, values: Floats, tokens: int) -> Floats:
        """``out[p] = values[p + tokens]``."""
        if self.remaining is None or tokens == 0:
            return values
        return np.concatenate([values[tokens:], np.zeros(min(tokens, self.places))])

    def _shifted(self, level: int, tokens: int) -> Floats:
        return self.ahead(self.accept[level - 1], tokens)

    def wanted(self, level: int) -> _Ints:
        """``[P]``, tokens that a level waits for from its position on: its window, or as many as
        the end of the text leaves it, a token less for itself and for every level above it."""
        window = self.windows[level - 1]
        if self.remaining is None:
            return np.array([window], np.int64)
        return np.clip(self.remaining - level, 0, window)

    def _block(self, level: int, lags: _Lags) -> tuple[_Outcomes, _Log]:
        """Level `level` gathers and verifies once; `lags` are of the levels from it on down.
        Outcomes: tokens handed up and the lags then. Log: by block numbers from here on."""
        log: _Log = {}
        ready = self._draft(lags, log) if level == self.levels - 1 else None
        if ready is None:
            ready = self._gather(level, lags, log)
        outcomes: _Outcomes = {}
        part, spent, verified = (np.zeros(self.places) for _ in range(3))
        for (pending, below), probability in ready.items():
            part = part + probability
            spent = spent + probability * self.seconds.verify(level, pending, lags[0])
            verified = verified + probability * pending
            reach = probability
            for j in range(pending + 1):
                last = j == pending
                passed = np.zeros(self.places) if last else reach * self._accepts(level, j)
                stopped = reach - passed
                if stopped.max() > _TINY:
                    unread = (1, *self._unread(level, below, pending - j))
                    key = (j + 1, unread)
                    outcomes[key] = outcomes.get(key, 0.0) + stopped
                reach = passed
                if reach.max() <= _TINY:
                    break
        log[()] = _Steps(level, part, spent, verified)
        return outcomes, log

    def _unread(self, level: int, lags: _Lags, rejected: int) -> list[int]:
        """Of the levels below `level`, behind a verification. A level further behind than its
        number has not been asked for a while, and reads the rest before it is (`Engine`)."""
        numbers = range(level + 1, self.levels + 1)
        return [
            min(max(1, lag + 1 - rejected), number)
            for number, lag in zip(numbers, lags, strict=True)
        ]

    def _accepts(self, level: int, place: int) -> Floats:
        if level == self.levels - 1 and self.proposals is not None:
            accept: Floats = self.proposals.accept[:, place]
            return accept
        return self.shifted(level, place)

    def _draft(self, lags: _Lags, log: _Log) -> dict[tuple[int, _Lags], Floats]:
        wanted = self.wanted(self.levels - 1)
        given = wanted
        if self.proposals is not None:
            given = np.minimum(wanted, self.proposals.counts)
        spent = np.zeros(self.places)
        for tokens in np.unique(wanted[wanted > 0]).tolist():
            spent[wanted == tokens] = self.seconds.draft(tokens, lags[1])
        asked = (wanted > 0).astype(np.float64)
        if asked.any():
            log[(0,)] = _Steps(self.levels, asked, spent, np.zeros(self.places))
        ready: dict[tuple[int, _Lags], Floats] = {}
        for tokens in np.unique(given).tolist():
            here = given == tokens
            for lag, which in ((1, here & (wanted > 0)), (lags[1], here & (wanted == 0))):
                if which.any():
                    now = ready.get((tokens, (lag,)), 0.0)
                    ready[tokens, (lag,)] = now + which.astype(np.float64)
        return ready

    def _gather(self, level: int, lags: _Lags, log: _Log) -> dict[tuple[int, _Lags], Floats]:
        wanted, bound = self.wanted(level), self.rounds[level - 1]
        states: dict[tuple[int, _Lags], Floats] = {(0, lags[1:]): np.ones(self.places)}
        ready: dict[tuple[int, _Lags], Floats] = {}
        blocks = 0
        while states:
            more: dict[tuple[int, _Lags], Floats] = {}
            for (pending, below), probability in states.items():
                full = (pending >= wanted) | (bound > 0 and blocks >= bound)
                done = probability * full
                if done.max() > _TINY:
                    ready[pending, below] = ready.get((pending, below), 0.0) + done
                going = probability * ~full
                if going.max() <= _TINY:
                    continue
                outcomes, inner = self.block(level + 1, below)
                for place, step in inner.items():
                    new = [going * self.ahead(values, pending) for values in step[1:]]
                    path = (blocks, *place)
                    old = log.get(path)
                    if old is not None:
                        new = [a + b for a, b in zip(new, old[1:], strict=True)]
                    log[path] = _Steps(step.level, new[0], new[1], new[2])
                for (emitted, unread), chance in outcomes.items():
                    moved = going * self.ahead(chance, pending)
                    if moved.max() > _TINY:
                        key = (pending + emitted, unread)
                        more[key] = more.get(key, 0.0) + moved
            states, blocks = more, blocks + 1
        return ready


def expectation(
    windows: Sequence[int],
    rounds: Sequence[int],
    acceptance: Acceptance,
    seconds: PassSeconds,
    batch: int = 1,
) -> Expectation:
    """Expected tokens, steps and seconds of a chain.

    Args:
        windows: of level 1 ... n-1. Empty: the target alone.
        rounds: ``rounds[i]`` bounds the blocks that level i+1 waits for; 0: no bound. For every
            level above the lowest that verifies.
        acceptance: of every level that verifies.
        seconds: of one step of a batch of `batch` rows.
        batch: rows, which wait for each other: a step takes its time if any row takes part in it.

    Raises:
        ValueError: another number of rounds, or of acceptances.
    """
    count = len(windows)
    if len(acceptance.levels) != count:
        raise ValueError(
            f"acceptance: expected one for each of {count} levels that verify, given "
            f"{len(acceptance.levels)}"
        )
    if count and len(rounds) != count - 1:
        raise ValueError(f"rounds: expected {count - 1} numbers, given {list(rounds)}")
    if count == 0:
        return _alone(acceptance, seconds, batch)
    chain = _Chain(windows, (*rounds, 0), acceptance, seconds)
    begin: _Lags = (1,) * count
    known: dict[_Lags, tuple[_Outcomes, _Log]] = {}
    todo = [begin]
    while todo:
        lags = todo.pop()
        if lags not in known:
            known[lags] = chain.block(1, (1, *lags))
            todo += [unread[1:] for _, unread in known[lags][0]]
    order = list(known)
    visits = _visits(chain, known, order)
    starts = _starts(chain)
    texts = len(starts)
    rounds_by_text = np.add.reduceat(visits.sum(1), starts)
    steps, spent = np.zeros((texts, count + 1)), np.zeros((texts, count + 1))
    verified = np.zeros(count)
    total = float(visits.sum())
    parts: dict[tuple[int, ...], list[float]] = {}
    tokens = np.zeros(texts)
    for at, lags in enumerate(order):
        weight = visits[:, at]
        outcomes, log = known[lags]
        for (emitted, _), chance in outcomes.items():
            tokens += emitted * np.add.reduceat(weight * chance, starts)
        for place, step in log.items():
            steps[:, step.level - 1] += np.add.reduceat(weight * step.part, starts)
            own = np.add.reduceat(weight * step.seconds, starts)
            spent[:, step.level - 1] += own
            if step.level <= count:
                verified[step.level - 1] += float(weight @ step.verified) / total
            entry = parts.setdefault(place, [0.0, 0.0])
            entry[0] += float(weight @ step.part) / total
            entry[1] += float(own.sum()) / total
    round_seconds = sum(
        cost / part * (1 - (1 - min(part, 1.0)) ** batch)
        for part, cost in parts.values()
        if part > 0
    )
    return Expectation(rounds_by_text, tokens, steps, spent, round_seconds, verified, batch)


def _alone(acceptance: Acceptance, seconds: PassSeconds, batch: int) -> Expectation:
    each = seconds.verify(1, 0, 1)
    tokens = np.ones(1)
    if acceptance.remaining is not None:
        remaining = acceptance.remaining
        tokens = remaining[np.append(True, remaining[1:] >= remaining[:-1])].astype(np.float64)
    steps = tokens[:, None]
    return Expectation(tokens, tokens, steps, steps * each, each, np.zeros(0), batch)


def _starts(chain: _Chain) -> _Ints:
    if chain.remaining is None:
        return np.zeros(1, np.int64)
    longer = chain.remaining[1:] >= chain.remaining[:-1]
    return np.flatnonzero(np.append(True, longer))


def _visits(
    chain: _Chain, known: dict[_Lags, tuple[_Outcomes, _Log]], order: Sequence[_Lags]
) -> Floats:
    """``[P, S]``, the expected number of rounds that begin at a position with these lags."""
    number = {lags: at for at, lags in enumerate(order)}
    size = len(order)
    most = max(emitted for outcomes, _ in known.values() for emitted, _ in outcomes)
    moves = np.zeros((chain.places, size, most, size))
    for lags, (outcomes, _) in known.items():
        for (emitted, unread), chance in outcomes.items():
            moves[:, number[lags], emitted - 1, number[unread[1:]]] += chance
    if chain.remaining is None:
        # Stationary distribution of the lags.
        table = moves[0].sum(1)
        system = np.vstack([table.T - np.eye(size), np.ones(size)])
        solved: Floats = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
        return solved[None]
    begins = set(_starts(chain).tolist())
    mass = np.zeros((chain.places + most, size))
    flat = moves.reshape(chain.places, size, most * size)
    for place in range(chain.places):
        if place in begins:
            mass[place] = 0.0
            mass[place, 0] = 1.0  # nothing but the last token of the prompt is unread
        mass[place + 1 : place + 1 + most] += (mass[place] @ flat[place]).reshape(most, size)
    return mass[: chain.places]


def cascade_improvement(
    acceptance: float, inner: float, rounds: int, tokens: int, cost: float, inner_cost: float
) -> float:
    """Cascade Speculative Drafting (Chen et al. 2023) with a fixed number of inner rounds: expected
    improvement of wall time ``(1 - a phi(a)^n) / ((1-a)(1 + n c1 + n k c2))``, with ``phi(x) = 1 +
    (x-1)(1 - a'^{k+1} x^{k+1})/(1 - a' x)``.

    Args:
        acceptance: a, of M_1 for M_2's tokens, < 1.
        inner: a', of M_2 for M_3's.
        rounds: n, of M_2 per round of M_1.
        tokens: k, of M_3 per round of M_2.
        cost, inner_cost: c1 = T_2 / T_1, c2 = T_3 / T_1.
    """
    a, b, k = acceptance, inner, tokens
    phi = 1 + (a - 1) * (1 - (a * b) ** (k + 1)) / (1 - a * b)
    return (1 - a * phi**rounds) / ((1 - a) * (1 + rounds * cost + rounds * k * inner_cost))
