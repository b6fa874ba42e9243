"""One round of the target: what each level verifies and hands up, from every position of a text.

The state rows say whose step is due and over how many tokens, as they do to the engine
(``polyspec/round_state.hpp``). What comes of the steps is expected here: a verification of m tokens
that accepts j hands j + 1 up, what is pending can overshoot the window, and what a level above
rejects is lost. A level reads, beside the tokens that are pending for it, those that it has not
read yet (``unread``): its own last token, the bonus of every level above it, and a tail, which
level n adds to what is pending for the target and the levels between do not verify.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..._C import RoundShape, schedule_due
from ...runtime.plan import round_plan
from .acceptance import Acceptance, PassSeconds, Proposals
from .lengths import Floats, Ints

Lags = tuple[int, ...]  # tokens that each of several levels has not read yet
_TINY = 1e-14  # states less likely than this are left out
_ENDLESS = 2**40  # tokens


class Steps(NamedTuple):
    """A step of `level` at one place of a round, from each position P of the texts."""

    level: int
    part: Floats  # [P] probability that it is done
    seconds: Floats  # [P] expected
    verified: Floats  # [P] expected tokens; of a draft, those of a tail
    # [P] probability by what its time depends on (`RoundModel.cost`); kept for batches only
    sizes: dict[int, Floats]


# [P] probability by tokens handed up and the lags behind them.
Outcomes = dict[tuple[int, Lags], Floats]
Log = dict[tuple[int, ...], Steps]  # by block numbers, from the level in question downwards
# By tokens pending, how many of these are of a tail, and the lags of the levels below.
_Ready = dict[tuple[int, int, Lags], Floats]


class RoundModel:
    """What the levels of a chain may do until the target has verified once. Arguments are those of
    `renewal.expectation`, with a bound of 0 for the lowest level that verifies."""

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
        self.plan = round_plan(tuple(windows), tuple(rounds), tail)
        self.tail = self.plan.tail
        self.accept_tail = acceptance.tail
        self.remaining = acceptance.remaining
        self.room = acceptance.remaining if acceptance.room is None else acceptance.room
        self.places = 1 if self.remaining is None else len(self.remaining)
        self.due = functools.cache(self._due)
        self.rows = functools.cache(self._rows)
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

    def _rows(self, level: int) -> tuple[Ints, Ints]:
        """State rows (``polyspec/round_state.hpp``) of the chain that begins with `level`, for
        every number of tokens that it may have room for, and ``[P]``, which of them is that of each
        position. A text that ends with an EOS has room up to that."""
        room = np.array([_ENDLESS], np.int64)
        if self.remaining is not None and self.room is not None:
            room = np.minimum(self.remaining + 1, self.room + 1 - level).clip(1)
        rooms, place = np.unique(room, return_inverse=True)
        below = self.levels - level
        shape = RoundShape(below + 1, 0, 0)
        rows = np.zeros((len(rooms), shape.words), np.int64)
        rows[:, shape.ROOM] = rooms
        for number in range(below):
            own = shape.level_at(number + 1)
            rows[:, own + shape.WINDOW] = self.windows[level - 1 + number]
            rows[:, own + shape.BOUND] = self.rounds[level - 1 + number]
        return rows, place

    def _due(self, level: int, pending: int, blocks: int, tail: int = 0) -> tuple[Ints, Ints]:
        """``[P]`` each: the level whose step is due where so many tokens in so many blocks are
        pending for `level` and none for those below it, and how many it drafts or verifies."""
        rows, place = self.rows(level)
        shape = RoundShape(self.levels - level + 1, 0, 0)
        own = shape.level_at(1)
        rows[:, own + shape.PENDING], rows[:, own + shape.BLOCKS] = pending, blocks
        rows[:, shape.TAIL_WINDOW] = tail
        levels, counts = schedule_due(rows, shape.levels)
        return levels[place] + level - 1, counts[place]

    def _block(self, level: int, lags: Lags, again: bool) -> tuple[Outcomes, Log]:
        """Level `level` gathers and verifies once; `lags` are of the levels from it on down.
        Outcomes: tokens handed up and the lags then. Log: by block numbers from here on."""
        log: Log = {}
        ready = self._draft(lags, log, again) if level == self.levels - 1 else None
        if ready is None:
            ready = self._gather(level, lags, log)
        outcomes: Outcomes = {}
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
        log[()] = Steps(level, part, spent, verified, sizes)
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

    def _unread(self, level: int, lags: Lags, rejected: int) -> list[int]:
        """Of the levels below `level`, behind a verification. A level further behind than a round
        without it leaves it (`RoundPlan.lag`) has not been asked for a while, and reads the rest
        before it is (`Engine`)."""
        if not self.counts_unread:
            return [1] * len(lags)
        numbers = range(level + 1, self.levels + 1)
        return [
            min(max(1, lag + 1 - rejected), self.plan.lag(number))
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

    def _draft(self, lags: Lags, log: Log, again: bool) -> _Ready:
        due, wanted = self.due(self.levels - 1, 0, 0)
        wanted = np.where(due == self.levels, wanted, 0)
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
            log[(0,)] = Steps(self.levels, asked, spent, np.zeros(self.places), sizes)
        ready: _Ready = {}
        for tokens in np.unique(given).tolist():
            here = given == tokens
            for lag, which in ((1, here & (wanted > 0)), (lags[1], here & (wanted == 0))):
                if which.any():
                    _add(ready, (tokens, 0, (lag,)), which.astype(np.float64))
        return ready

    def _draft_tail(
        self, blocks: int, pending: int, lags: Lags, chance: Floats, log: Log, ready: _Ready
    ) -> None:
        """Level n adds a tail to the tokens that so many blocks have made pending for level 1.

        Args:
            lags: of the levels below level 1.
            chance: ``[P]``, that a tail is due.
        """
        due, wanted = self.due(1, pending, blocks, self.tail)
        wanted = np.where(due == self.levels, wanted, 0)
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
            _log_steps(log, path, Steps(self.levels, part, spent, part * count, sizes))
            behind = (*(lag + count for lag in lags[:-1]), 1) if self.counts_unread else lags
            _add(ready, (pending + count, count, behind), part)

    def _gather(self, level: int, lags: Lags, log: Log) -> _Ready:
        states: dict[tuple[int, Lags], Floats] = {(0, lags[1:]): np.ones(self.places)}
        ready: _Ready = {}
        blocks = 0
        while states:
            more: dict[tuple[int, Lags], Floats] = {}
            for (pending, below), probability in states.items():
                full = self.due(level, pending, blocks)[0] == level
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
                    _log_steps(log, path, Steps(step.level, part, spent, verified, sizes))
                for (emitted, unread), chance in outcomes.items():
                    moved = going * self.ahead(chance, pending)
                    if moved.max() > _TINY:
                        key = (pending + emitted, unread)
                        more[key] = more.get(key, 0.0) + moved
            states, blocks = more, blocks + 1
        return ready


def _add(ready: _Ready, key: tuple[int, int, Lags], chance: Floats) -> None:
    ready[key] = ready.get(key, 0.0) + chance


def _log_steps(log: Log, path: tuple[int, ...], step: Steps) -> None:
    """Adds a step to those that are known at its place of a round."""
    old = log.get(path)
    if old is None:
        log[path] = step
        return
    part, spent, verified = (a + b for a, b in zip(step[1:4], old[1:4], strict=True))
    sizes = dict(old.sizes)
    for size, chance in step.sizes.items():
        sizes[size] = sizes.get(size, 0.0) + chance
    log[path] = Steps(step.level, part, spent, verified, sizes)
