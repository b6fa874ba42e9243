"""One round of the target: what each level verifies and hands up, from every position of a text.

The state rows say whose step is due and over how many tokens, as they do to the engine
(``polyspec/round_state.hpp``). What comes of the steps is expected here: a verification of m tokens
that accepts j hands j + 1 up, what is pending can overshoot the window, what a level above rejects
is lost, and a tail, which level n adds to what is pending for the target, is verified by no level
between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..._C import RoundShape, schedule_due
from .acceptance import Acceptance, Floats, Ints, PassSeconds, Proposals

TINY = 1e-14  # states less likely than this are left out
_ENDLESS = 2**40  # tokens


class Steps(NamedTuple):
    """A step of `level` at one place of a round, from each position P of the texts."""

    level: int
    part: Floats  # [P] probability that it is done
    seconds: Floats  # [P] expected
    verified: Floats  # [P] expected tokens; of a draft, those of a tail
    # [P] probability by what its time depends on (`RoundModel.cost`); kept for batches only
    sizes: dict[int, Floats]


Outcomes = dict[int, Floats]  # [P] probability by tokens handed up
Log = dict[tuple[int, ...], Steps]  # by block numbers, from the level in question downwards
_Ready = dict[tuple[int, int], Floats]  # by tokens pending, and how many of these are of a tail


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
    ) -> None:
        self.windows, self.rounds, self.seconds = windows, rounds, seconds
        self.batch = batch
        self.levels = len(windows) + 1
        self.accept, self.proposals = acceptance.levels, acceptance.proposals
        # As the state rows have it: a tail has no more tokens than a draft.
        self.tail = min(tail, windows[-1]) if tail and windows[0] else 0
        self.accept_tail = acceptance.tail
        self.remaining = acceptance.remaining
        self.room = acceptance.remaining if acceptance.room is None else acceptance.room
        self.places = 1 if self.remaining is None else len(self.remaining)
        self.due = functools.cache(self._due)
        self.rows = functools.cache(self._rows)
        self.block = functools.cache(self._block)
        self.cost = functools.cache(self._cost)

    def _cost(self, path: tuple[int, ...], level: int, size: int, rows: int) -> float:
        """Seconds of a step of several rows. path: its block numbers; size: of a draft the tokens
        asked for, of a verification those verified."""
        if 1 < level == self.levels:
            return self.seconds.draft(size, rows, len(path) > 1 and path[-2] > 0)
        return self.seconds.verify(level, size, rows, len(path) > 0 and path[-1] > 0)

    def ahead(self, values: Floats, tokens: int) -> Floats:
        """``out[p] = values[p + tokens]``."""
        if self.remaining is None or tokens == 0:
            return values
        return np.concatenate([values[tokens:], np.zeros(min(tokens, self.places))])

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

    def _block(self, level: int, again: bool) -> tuple[Outcomes, Log]:
        """Level `level` gathers and verifies once; the log is by block numbers from here on."""
        log: Log = {}
        if level == self.levels:  # the target alone
            ready: _Ready = {(0, 0): np.ones(self.places)}
        elif level == self.levels - 1:
            ready = self._draft(log, again)
        else:
            ready = self._gather(level, log)
        outcomes: Outcomes = {}
        part, spent, verified = (np.zeros(self.places) for _ in range(3))
        sizes: dict[int, Floats] = {}
        for (pending, of_tail), probability in ready.items():
            if self.batch > 1:
                sizes[pending] = sizes.get(pending, 0.0) + probability
            part = part + probability
            spent = spent + probability * self.seconds.verify(level, pending, again=again)
            verified = verified + probability * pending
            reach = probability
            for j in range(pending + 1):
                passed = np.zeros(self.places)
                if j < pending:
                    passed = reach * self._accepts(level, j, pending - of_tail)
                for emitted, chance in self._emitted(j, reach - passed):
                    outcomes[emitted] = outcomes.get(emitted, 0.0) + chance
                reach = passed
                if reach.max() <= TINY:
                    break
        log[()] = Steps(level, part, spent, verified, sizes)
        return outcomes, log

    def _emitted(self, accepted: int, chance: Floats) -> Iterator[tuple[int, Floats]]:
        """Tokens handed up where so many were accepted: one more, unless the last is an EOS."""
        if chance.max() <= TINY:
            return
        if self.room is self.remaining or accepted == 0:
            yield accepted + 1, chance
            return
        ends = self.remaining == accepted
        for emitted, here in ((accepted, ends), (accepted + 1, ~ends)):
            if (chance * here).max() > TINY:
                yield emitted, chance * here

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
        return self.ahead(self.accept[level - 1], place)

    def _draft(self, log: Log, again: bool) -> _Ready:
        due, wanted = self.due(self.levels - 1, 0, 0)
        wanted = np.where(due == self.levels, wanted, 0)
        given = wanted if self.proposals is None else np.minimum(wanted, self.proposals.counts)
        spent = np.zeros(self.places)
        sizes: dict[int, Floats] = {}
        for tokens in np.unique(wanted[wanted > 0]).tolist():
            spent[wanted == tokens] = self.seconds.draft(tokens, again=again)
            if self.batch > 1:
                sizes[tokens] = (wanted == tokens).astype(np.float64)
        if wanted.any():
            asked = (wanted > 0).astype(np.float64)
            log[(0,)] = Steps(self.levels, asked, spent, np.zeros(self.places), sizes)
        return {
            (tokens, 0): (given == tokens).astype(np.float64)
            for tokens in np.unique(given).tolist()
        }

    def _draft_tail(
        self, blocks: int, pending: int, chance: Floats, log: Log, ready: _Ready
    ) -> None:
        """Where a tail is due, with a `chance` ``[P]``, level n adds it to the tokens that so many
        blocks have made pending for level 1."""
        due, wanted = self.due(1, pending, blocks, self.tail)
        wanted = np.where(due == self.levels, wanted, 0)
        given = wanted
        if isinstance(self.accept_tail, Proposals):
            counts = self.ahead(self.accept_tail.counts.astype(np.float64), pending)
            given = np.minimum(wanted, counts.astype(np.int64))
        for tokens, count in np.unique(np.stack([wanted, given]), axis=1).T.tolist():
            part = chance * ((wanted == tokens) & (given == count))
            if part.max() <= TINY:
                continue
            if tokens > 0:
                # Rows whose window is not full yet draft their next block meanwhile.
                path = (blocks, *[0] * (self.levels - 2))
                spent = part * self.seconds.draft(tokens, again=self.levels == 3)
                sizes = {tokens: part} if self.batch > 1 else {}
                _log_steps(log, path, Steps(self.levels, part, spent, part * count, sizes))
            key = pending + count, count
            ready[key] = ready.get(key, 0.0) + part

    def _gather(self, level: int, log: Log) -> _Ready:
        states: dict[int, Floats] = {0: np.ones(self.places)}  # by tokens pending
        ready: _Ready = {}
        blocks = 0
        while states:
            more: dict[int, Floats] = {}
            for pending, probability in states.items():
                full = self.due(level, pending, blocks)[0] == level
                done = probability * full
                if done.max() > TINY and level == 1 and self.tail:
                    self._draft_tail(blocks, pending, done, log, ready)
                elif done.max() > TINY:
                    ready[pending, 0] = ready.get((pending, 0), 0.0) + done
                going = probability * ~full
                if going.max() <= TINY:
                    continue
                outcomes, inner = self.block(level + 1, blocks > 0)
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
                for emitted, chance in outcomes.items():
                    moved = going * self.ahead(chance, pending)
                    if moved.max() > TINY:
                        more[pending + emitted] = more.get(pending + emitted, 0.0) + moved
            states, blocks = more, blocks + 1
        return ready


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
