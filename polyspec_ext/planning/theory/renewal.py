"""What a chain costs per token, exactly, where acceptances are independent of each other: a renewal
process whose cycles are the rounds of the target.

The chain is the engine's (`runtime.plan`, ``polyspec/round_state.hpp``): level i waits until its
window is full or its bounded number of blocks has come; a verification of m tokens that accepts j
hands j + 1 up; what is pending can overshoot the window; and what a level above rejects is lost. A
level reads, beside the tokens that are pending for it, those that it has not read yet (``unread``):
its own last token, the bonus of every level above it, and a tail, which level n adds to what is
pending for the target and the levels between do not verify.

Acceptances may be one number per level (an endless text, its steady state), or be given at every
position of recorded texts. Where such a text ends with an EOS no block goes beyond it: a level that
proposes another token there, and more behind it, is rejected at that place anyhow. Along a text
drawn from the target's distribution p, a token that was tested was accepted with probability min(1,
q/p) at that very token, whatever windows the chain had (its text does not depend on them, contract
C2), so such a replay is exact for two levels. For more, the levels below are taken to accept as
they would along the same text, also behind a token that the target rejects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .lengths import Floats

_Ints = NDArray[np.int64]
_Lags = tuple[int, ...]
_TINY = 1e-14  # states less likely than this are left out
_UNLIKELY = 1e-9  # rounds of a batch


class PassSeconds(Protocol):
    """Seconds of the steps of a chain of n levels, with `rows` rows in its caches. A step of
    several rows takes the time of the one with the most to read. `again`: since the level's last
    step no level above it has run, or, of level n, neither the target nor any above the one that it
    drafts for: its weights may lie in a cache of the processor still."""

    def verify(
        self, level: int, pending: int, unread: int, rows: int = 1, again: bool = False
    ) -> float:
        """Level `level` verifies `pending` tokens, in a pass that reads `unread` more; 1 at
        least."""
        ...

    def draft(self, tokens: int, unread: int, rows: int = 1, again: bool = False) -> float:
        """Level n is asked for `tokens`, of which the first pass reads `unread`."""
        ...


@dataclass(frozen=True)
class ConstantSeconds:
    """A pass of M_i takes T_i whatever it reads, and M_n one pass for each token: the papers' view.

    Args:
        seconds: T_1 ... T_n.
    """

    seconds: Sequence[float]

    def verify(
        self, level: int, pending: int, unread: int, rows: int = 1, again: bool = False
    ) -> float:
        return self.seconds[level - 1]

    def draft(self, tokens: int, unread: int, rows: int = 1, again: bool = False) -> float:
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
        tail: how likely level 1 accepts what level n proposes, ``[P]`` as `levels` have it or as
            `proposals` do. None: for chains without a tail.
        room: ``[P]``, tokens that the request allows from position p on; more than `remaining`
            where the text ends with an EOS, which no level knows before it is proposed. None: each
            text is as long as its request allows.
    """

    levels: tuple[Floats, ...]
    remaining: _Ints | None = None
    proposals: Proposals | None = None
    tail: Floats | Proposals | None = None
    room: _Ints | None = None

    @classmethod
    def constant(cls, *levels: float, tail: float | None = None) -> Acceptance:
        """The same everywhere: a_1 ... a_{n-1}, and that of a tail."""
        own = None if tail is None else np.array([tail], np.float64)
        return cls(tuple(np.array([a], np.float64) for a in levels), tail=own)


@dataclass(frozen=True)
class Expectation:
    """Expected numbers of recorded texts, or, of an endless one, of one round of the target.

    Attributes:
        rounds: ``[G]`` by batch, its rows' rounds added up.
        tokens: ``[G]``, committed.
        steps: ``[G, n]``, verifications of level 1 ... n-1 and drafts of level n, each row's own
            added up.
        batch_steps: ``[G, n]``, the same of the batch: a step of several rows is one. Of a batch of
            one row they are the row's.
        seconds: ``[G, n]``, spent in them.
        verified: ``[n - 1]``, tokens verified per round of a row by level 1 ... n-1.
        tail: of these, tokens of a tail, by level 1.
    """

    rounds: Floats
    tokens: Floats
    steps: Floats
    batch_steps: Floats
    seconds: Floats
    verified: Floats
    tail: float = 0.0

    @property
    def length(self) -> float:
        """Tokens committed per row and round of the target; tau."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def round_seconds(self) -> float:
        """Of one round of a batch, all of its rows together."""
        return float(self.seconds.sum() / self.batch_steps[:, 0].sum())

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return float(self.tokens.sum() / self.seconds.sum())

    def emitted(self, level: int) -> float:
        """Tokens handed up per verification of `level`; L_i for the target."""
        if level == 1:
            return self.length
        counts = self.steps.sum(0)
        pending = self.verified[level - 2] - (self.tail if level == 2 else 0.0)
        above = float(pending * self.rounds.sum())
        return above / float(counts[level - 1]) if counts[level - 1] else float("nan")


class _Steps(NamedTuple):
    level: int
    part: Floats  # [P] probability that it is done
    seconds: Floats  # [P] expected
    verified: Floats  # [P] expected tokens; of a draft, those of a tail
    # [P] probability by what its time depends on (`_Chain.cost`); kept for batches only
    sizes: dict[int, Floats]


_Outcomes = dict[tuple[int, _Lags], Floats]
_Log = dict[tuple[int, ...], _Steps]
# By tokens pending, how many of these are of a tail, and the lags of the levels below.
_Ready = dict[tuple[int, int, _Lags], Floats]


class _Chain:
    def __init__(
        self,
        windows: Sequence[int],
        rounds: Sequence[int],
        acceptance: Acceptance,
        seconds: PassSeconds,
        batch: int,
        tail: int,
        unread: bool,
    ) -> None:
        self.counts_unread = unread
        self.windows, self.rounds, self.seconds = windows, rounds, seconds
        self.batch = batch
        self.levels = len(windows) + 1
        self.accept, self.proposals = acceptance.levels, acceptance.proposals
        self.tail = min(tail, windows[-1])
        self.accept_tail = acceptance.tail
        self.remaining = acceptance.remaining
        self.room = acceptance.remaining if acceptance.room is None else acceptance.room
        self.places = 1 if self.remaining is None else len(self.remaining)
        self.block = functools.cache(self._block)
        self.shifted = functools.cache(self._shifted)
        self.cost = functools.cache(self._cost)

    def _cost(self, path: tuple[int, ...], level: int, size: int, rows: int) -> float:
        """Seconds of a step of several rows. path: its block numbers; size: of a draft the tokens
        asked for, of a verification those read less one."""
        if level == self.levels:
            return self.seconds.draft(size, 1, rows, len(path) > 1 and path[-2] > 0)
        return self.seconds.verify(level, size, 1, rows, len(path) > 0 and path[-1] > 0)

    def ahead(self, values: Floats, tokens: int) -> Floats:
        """``out[p] = values[p + tokens]``."""
        if self.remaining is None or tokens == 0:
            return values
        return np.concatenate([values[tokens:], np.zeros(min(tokens, self.places))])

    def _shifted(self, level: int, tokens: int) -> Floats:
        return self.ahead(self.accept[level - 1], tokens)

    def wanted(self, level: int) -> _Ints:
        """``[P]``, tokens that a level waits for from its position on: its window, or as many as
        `fitting` leaves of it."""
        return self.fitting(self.windows[level - 1], level)

    def fitting(self, tokens: int, above: int, behind: int = 0) -> _Ints:
        """``[P]``, of so many tokens behind others those that the text has room for: up to an EOS,
        or to the last that the request allows, less one for each level above."""
        if self.remaining is None or self.room is None:
            return np.array([tokens], np.int64)
        left: _Ints = np.minimum(self.remaining, self.room - above) - behind
        return left.clip(0, tokens)

    def _block(self, level: int, lags: _Lags, again: bool) -> tuple[_Outcomes, _Log]:
        """Level `level` gathers and verifies once; `lags` are of the levels from it on down.
        Outcomes: tokens handed up and the lags then. Log: by block numbers from here on."""
        log: _Log = {}
        ready = self._draft(lags, log, again) if level == self.levels - 1 else None
        if ready is None:
            ready = self._gather(level, lags, log)
        outcomes: _Outcomes = {}
        part, spent, verified = (np.zeros(self.places) for _ in range(3))
        sizes: dict[int, Floats] = {}
        for (pending, of_tail, below), probability in ready.items():
            if self.batch > 1:
                size = pending + lags[0] - 1
                sizes[size] = sizes.get(size, 0.0) + probability
            part = part + probability
            cost = self.seconds.verify(level, pending, lags[0], again=again)
            spent = spent + probability * cost
            verified = verified + probability * pending
            reach = probability
            for j in range(pending + 1):
                last = j == pending
                passed = np.zeros(self.places)
                if not last:
                    passed = reach * self._accepts(level, j, pending - of_tail)
                stopped = reach - passed
                unread = (1, *self._unread(level, below, pending - j))
                for emitted, part_of in self._emitted(j, stopped):
                    key = (emitted, unread)
                    outcomes[key] = outcomes.get(key, 0.0) + part_of
                reach = passed
                if reach.max() <= _TINY:
                    break
        log[()] = _Steps(level, part, spent, verified, sizes)
        return outcomes, log

    def _emitted(self, accepted: int, chance: Floats) -> Iterator[tuple[int, Floats]]:
        """Tokens handed up where so many were accepted: one more, unless the last is an EOS."""
        if chance.max() <= _TINY:
            return
        if self.room is self.remaining or accepted == 0:
            yield accepted + 1, chance
            return
        ends = self.remaining == accepted
        for emitted, here in ((accepted, ends), (accepted + 1, ~ends)):
            if (chance * here).max() > _TINY:
                yield emitted, chance * here

    def _unread(self, level: int, lags: _Lags, rejected: int) -> list[int]:
        """Of the levels below `level`, behind a verification. A level further behind than a round
        without it leaves it (`RoundPlan.lag`) has not been asked for a while, and reads the rest
        before it is (`Engine`)."""
        if not self.counts_unread:
            return [1] * len(lags)
        numbers = range(level + 1, self.levels + 1)
        return [
            min(max(1, lag + 1 - rejected), number + (self.tail if number < self.levels else 0))
            for number, lag in zip(numbers, lags, strict=True)
        ]

    def _accepts(self, level: int, place: int, pending: int) -> Floats:
        """Of the token at `place` of a block, which begins a tail behind `pending` tokens."""
        if place >= pending:
            tail = self.accept_tail
            if isinstance(tail, Proposals):
                return self.ahead(tail.accept[:, place - pending], pending)
            assert tail is not None
            return self.ahead(tail, place)
        if level == self.levels - 1 and self.proposals is not None:
            accept: Floats = self.proposals.accept[:, place]
            return accept
        return self.shifted(level, place)

    def _draft(self, lags: _Lags, log: _Log, again: bool) -> _Ready:
        wanted = self.wanted(self.levels - 1)
        given = wanted
        if self.proposals is not None:
            given = np.minimum(wanted, self.proposals.counts)
        spent = np.zeros(self.places)
        sizes: dict[int, Floats] = {}
        for tokens in np.unique(wanted[wanted > 0]).tolist():
            spent[wanted == tokens] = self.seconds.draft(tokens, lags[1], again=again)
            if self.batch > 1:
                sizes[tokens] = (wanted == tokens).astype(np.float64)
        asked = (wanted > 0).astype(np.float64)
        if asked.any():
            log[(0,)] = _Steps(self.levels, asked, spent, np.zeros(self.places), sizes)
        ready: _Ready = {}
        for tokens in np.unique(given).tolist():
            here = given == tokens
            for lag, which in ((1, here & (wanted > 0)), (lags[1], here & (wanted == 0))):
                if which.any():
                    _add(ready, (tokens, 0, (lag,)), which.astype(np.float64))
        return ready

    def _draft_tail(
        self, blocks: int, pending: int, lags: _Lags, chance: Floats, log: _Log, ready: _Ready
    ) -> None:
        """Level n adds a tail to the tokens that so many blocks have made pending for level 1.

        Args:
            lags: of the levels below level 1.
            chance: ``[P]``, that a tail is due.
        """
        wanted = self.fitting(self.tail if pending else 0, 1, pending)
        given = wanted
        if isinstance(self.accept_tail, Proposals):
            counts = self.ahead(self.accept_tail.counts.astype(np.float64), pending)
            given = np.minimum(wanted, counts.astype(np.int64))
        for tokens, count in np.unique(np.stack([wanted, given]), axis=1).T.tolist():
            part = chance * ((wanted == tokens) & (given == count))
            if part.max() <= _TINY:
                continue
            if tokens == 0:
                _add(ready, (pending, 0, lags), part)
                continue
            # Rows whose window is not full yet draft their next block meanwhile.
            path = (blocks, *[0] * (self.levels - 2))
            spent = part * self.seconds.draft(tokens, lags[-1], again=self.levels == 3)
            sizes = {tokens: part} if self.batch > 1 else {}
            _log_steps(log, path, _Steps(self.levels, part, spent, part * count, sizes))
            behind = (*(lag + count for lag in lags[:-1]), 1) if self.counts_unread else lags
            _add(ready, (pending + count, count, behind), part)

    def _gather(self, level: int, lags: _Lags, log: _Log) -> _Ready:
        wanted, bound = self.wanted(level), self.rounds[level - 1]
        states: dict[tuple[int, _Lags], Floats] = {(0, lags[1:]): np.ones(self.places)}
        ready: _Ready = {}
        blocks = 0
        while states:
            more: dict[tuple[int, _Lags], Floats] = {}
            for (pending, below), probability in states.items():
                full = (pending >= wanted) | (bound > 0 and blocks >= bound)
                done = probability * full
                if done.max() > _TINY and level == 1 and self.tail:
                    self._draft_tail(blocks, pending, below, done, log, ready)
                elif done.max() > _TINY:
                    _add(ready, (pending, 0, below), done)
                going = probability * ~full
                if going.max() <= _TINY:
                    continue
                outcomes, inner = self.block(level + 1, below, blocks > 0)
                for place, step in inner.items():
                    part, spent, verified = (
                        going * self.ahead(values, pending) for values in step[1:4]
                    )
                    sizes = {
                        size: going * self.ahead(values, pending)
                        for size, values in step.sizes.items()
                    }
                    path = (blocks, *place)
                    _log_steps(log, path, _Steps(step.level, part, spent, verified, sizes))
                for (emitted, unread), chance in outcomes.items():
                    moved = going * self.ahead(chance, pending)
                    if moved.max() > _TINY:
                        key = (pending + emitted, unread)
                        more[key] = more.get(key, 0.0) + moved
            states, blocks = more, blocks + 1
        return ready


def _add(ready: _Ready, key: tuple[int, int, _Lags], chance: Floats) -> None:
    ready[key] = ready.get(key, 0.0) + chance


def _log_steps(log: _Log, path: tuple[int, ...], step: _Steps) -> None:
    """Adds a step to those that are known at its place of a round."""
    old = log.get(path)
    if old is None:
        log[path] = step
        return
    part, spent, verified = (a + b for a, b in zip(step[1:4], old[1:4], strict=True))
    sizes = dict(old.sizes)
    for size, chance in step.sizes.items():
        sizes[size] = sizes.get(size, 0.0) + chance
    log[path] = _Steps(step.level, part, spent, verified, sizes)


def expectation(
    windows: Sequence[int],
    rounds: Sequence[int],
    acceptance: Acceptance,
    seconds: PassSeconds,
    batch: int = 1,
    tail: int = 0,
    *,
    unread: bool = True,
) -> Expectation:
    """Expected tokens, steps and seconds of a chain.

    Args:
        windows: of level 1 ... n-1. Empty: the target alone.
        rounds: ``rounds[i]`` bounds the blocks that level i+1 waits for; 0: no bound. For every
            level above the lowest that verifies.
        acceptance: of every level that verifies.
        seconds: of one step.
        batch: rows. Texts are taken so many at a time, in their order, the first ones again where
            the last batch is short of some. Rows wait for each other: a step is taken if any row
            has a part in it, in the time of the row with the most tokens, and the target's rounds
            are those of all. Rows that are complete leave the caches once they are a quarter of
            them, as the engine has it (of their expected number). What rows accept is independent.
        tail: tokens that level n adds at most to those that the target verifies, as `Chain` has it.
        unread: False: every pass reads one token beside what is pending, whatever else the level
            has not read yet. Of chains of four levels, and of those with a tail, that is found many
            times as fast; where times are means over passes that have read more, it is right.

    Raises:
        ValueError: another number of rounds, or of acceptances; no row; or a tail of a chain that
            can have none, or whose acceptance is not given.
    """
    count = len(windows)
    if len(acceptance.levels) != count:
        raise ValueError(
            f"acceptance: expected one for each of {count} levels that verify, given "
            f"{len(acceptance.levels)}"
        )
    if count and len(rounds) != count - 1:
        raise ValueError(f"rounds: expected {count - 1} numbers, given {list(rounds)}")
    if batch < 1:
        raise ValueError(f"batch: expected 1 or more, given {batch}")
    if tail < 0 or (tail and count < 2):
        raise ValueError(
            f"tail: expected {'0 or more' if count > 1 else 0} for {count + 1} levels, given {tail}"
        )
    if tail and acceptance.tail is None:
        raise ValueError(
            f"acceptance: expected that of a tail as well, given none, for tail {tail}"
        )
    if count == 0:
        return _alone(acceptance, seconds, batch)
    chain = _Chain(windows, (*rounds, 0), acceptance, seconds, batch, tail, unread)
    begin: _Lags = (1,) * count
    known: dict[_Lags, tuple[_Outcomes, _Log]] = {}
    todo = [begin]
    while todo:
        lags = todo.pop()
        if lags not in known:
            known[lags] = chain.block(1, (1, *lags), False)
            todo += [unread[1:] for _, unread in known[lags][0]]
    order = list(known)
    starts = _starts(chain.remaining)
    texts = len(starts)
    by_round = None if batch == 1 else _visits_by_round(chain, known, order)
    if by_round is None:
        visits = _visits(chain, known, order)
    else:
        visits = np.concatenate([own.sum(0) for own in by_round])
    rounds_by_text = np.add.reduceat(visits.sum(1), starts)
    steps, spent = np.zeros((texts, count + 1)), np.zeros((texts, count + 1))
    verified = np.zeros(count + 1)  # the last: of tails
    total = float(visits.sum())
    tokens = np.zeros(texts)
    for at, lags in enumerate(order):
        weight = visits[:, at]
        outcomes, log = known[lags]
        for (emitted, _), chance in outcomes.items():
            tokens += emitted * np.add.reduceat(weight * chance, starts)
        for step in log.values():
            steps[:, step.level - 1] += np.add.reduceat(weight * step.part, starts)
            spent[:, step.level - 1] += np.add.reduceat(weight * step.seconds, starts)
            verified[step.level - 1] += float(weight @ step.verified) / total
    of_tails = float(verified[-1])
    if by_round is None:
        return Expectation(rounds_by_text, tokens, steps, steps, spent, verified[:-1], of_tails)
    rows = batches(texts, batch)
    logs = [known[lags][1] for lags in order]
    together = [_together(chain, logs, [(starts[x], by_round[x]) for x in own]) for own in rows]
    return Expectation(
        rounds_by_text[rows].sum(1),
        tokens[rows].sum(1),
        steps[rows].sum(1),
        np.array([done for done, _ in together]),
        np.array([cost for _, cost in together]),
        verified[:-1],
        of_tails,
    )


def batches(texts: int, batch: int) -> _Ints:
    """``[G, batch]``, the texts of every batch: so many at a time in their order, and the first
    ones again where the last batch is short of some."""
    return np.arange(-(-texts // batch) * batch).reshape(-1, batch) % texts


def _alone(acceptance: Acceptance, seconds: PassSeconds, batch: int) -> Expectation:
    lengths = np.ones(1, np.int64)
    if acceptance.remaining is not None:
        lengths = acceptance.remaining[_starts(acceptance.remaining)]
    lengths = lengths[batches(len(lengths), batch)]
    active = (lengths[:, :, None] > np.arange(lengths.max())).sum(1)
    spent = [
        sum(seconds.verify(1, 0, 1, rows) for rows in _slots(own[own > 0], batch)) for own in active
    ]
    tokens, rounds = lengths.sum(1).astype(np.float64), (active > 0).sum(1).astype(np.float64)
    steps = tokens[:, None]
    return Expectation(
        tokens, tokens, steps, rounds[:, None], np.array(spent)[:, None], np.zeros(0)
    )


def _slots(active: Iterable[float], batch: int) -> list[int]:
    """Rows in the caches by round, out of how many are not complete (`Engine.leave`)."""
    found, now = [], batch
    for some in active:
        if 4 * some <= 3 * now:
            now = max(1, round(some))
        found.append(now)
    return found


def _together(
    chain: _Chain, logs: Sequence[_Log], rows: Sequence[tuple[int, Floats]]
) -> tuple[Floats, Floats]:
    """``[n]`` each, steps of a batch and seconds spent in them.

    Args:
        logs: by lags.
        rows: where the text begins, and ``[R, P, S]`` visits by round, position in it and lags.
    """
    most = max(len(visits) for _, visits in rows)
    active = np.zeros(most)
    for _, visits in rows:
        active[: len(visits)] += visits.sum((1, 2))
    most = int((active > _UNLIKELY).sum())
    slots = np.array(_slots(active[:most], chain.batch))
    done, spent = np.zeros(chain.levels), np.zeros(chain.levels)
    for path, step in {path: step for log in logs for path, step in log.items()}.items():
        sizes = sorted({size for log in logs if path in log for size in log[path].sizes})
        # The probability that no row has a larger part in the step than each size; first: none.
        below = np.ones((most, len(sizes) + 1))
        for start, visits in rows:
            count, places = min(most, len(visits)), slice(start, start + visits.shape[1])
            parts = np.zeros((count, len(sizes)))
            for at, log in enumerate(logs):
                own = log[path].sizes if path in log else {}
                for column, size in enumerate(sizes):
                    if size in own:
                        parts[:, column] += visits[:count, :, at] @ own[size][places]
            reach = np.cumsum(parts, 1)
            nothing = np.maximum(0.0, 1 - reach[:, -1:])
            below[:count] *= np.concatenate([nothing, nothing + reach], 1)
        largest = np.diff(below, axis=1)
        costs = {
            rows: [chain.cost(path, step.level, size, rows) for size in sizes]
            for rows in set(slots.tolist())
        }
        done[step.level - 1] += largest.sum()
        table = np.array([costs[rows] for rows in slots.tolist()])
        spent[step.level - 1] += float((largest * table).sum())
    return done, spent


def _starts(remaining: _Ints | None) -> _Ints:
    if remaining is None:
        return np.zeros(1, np.int64)
    return np.flatnonzero(np.append(True, remaining[1:] >= remaining[:-1]))


def _moves(
    chain: _Chain, known: dict[_Lags, tuple[_Outcomes, _Log]], order: Sequence[_Lags]
) -> Floats:
    """``[P, S, E, S]``, the probability that a round commits e + 1 tokens and leaves these lags."""
    number = {lags: at for at, lags in enumerate(order)}
    most = max(emitted for outcomes, _ in known.values() for emitted, _ in outcomes)
    moves = np.zeros((chain.places, len(order), most, len(order)))
    for lags, (outcomes, _) in known.items():
        for (emitted, unread), chance in outcomes.items():
            moves[:, number[lags], emitted - 1, number[unread[1:]]] += chance
    return moves


def _stationary(moves: Floats) -> Floats:
    """``[1, S]``, of the lags of an endless text."""
    table = moves[0].sum(1)
    size = len(table)
    system = np.vstack([table.T - np.eye(size), np.ones(size)])
    solved: Floats = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0]
    return solved[None]


def _visits(
    chain: _Chain, known: dict[_Lags, tuple[_Outcomes, _Log]], order: Sequence[_Lags]
) -> Floats:
    """``[P, S]``, the expected number of rounds that begin at a position with these lags."""
    moves = _moves(chain, known, order)
    if chain.remaining is None:
        return _stationary(moves)
    begins = set(_starts(chain.remaining).tolist())
    _, size, most, _ = moves.shape
    mass = np.zeros((chain.places + most, size))
    flat = moves.reshape(chain.places, size, most * size)
    for place in range(chain.places):
        if place in begins:
            mass[place] = 0.0
            mass[place, 0] = 1.0  # nothing but the last token of the prompt is unread
        mass[place + 1 : place + 1 + most] += (mass[place] @ flat[place]).reshape(most, size)
    return mass[: chain.places]


def _visits_by_round(
    chain: _Chain, known: dict[_Lags, tuple[_Outcomes, _Log]], order: Sequence[_Lags]
) -> list[Floats]:
    """``[R, P, S]`` of each text: the probability that its round r begins at a position with these
    lags; of an endless one, of any round."""
    moves = _moves(chain, known, order)
    if chain.remaining is None:
        return [_stationary(moves)[None]]
    _, size, most, _ = moves.shape
    flat = moves.reshape(chain.places, size, most * size)
    starts = _starts(chain.remaining)
    found = []
    for start, length in zip(starts, chain.remaining[starts].tolist(), strict=True):
        mass = np.zeros((length + most, length, size))
        mass[0, 0, 0] = 1.0
        for place in range(length):
            last = place + 1  # rounds that can have begun here
            went = (mass[place, :last] @ flat[start + place]).reshape(last, most, size)
            room = min(length - 1, last)
            ahead = slice(place + 1, place + 1 + most)
            mass[ahead, 1 : room + 1] += went[:room].transpose(1, 0, 2)
        found.append(np.ascontiguousarray(mass[:length].transpose(1, 0, 2)))
    return found


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
