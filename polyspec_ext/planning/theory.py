"""Expected tokens and seconds of a chain of models.

`expectation` is a renewal model, exact if acceptances are independent of each other: its cycles
are the rounds of the target, and the scheduler's state rows decide which level acts (`RoundModel`).

Acceptance is a number per level (an endless text in its steady state), or a number per position of
recorded texts. A token drawn from the target's distribution p was accepted with probability
min(1, q/p), for all windows alike, since the text does not depend on them (contract C2). This
replay is exact for two levels. With more, it assumes that after a rejected token the levels below
accept as they would along the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _C

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
_Key = TypeVar("_Key")
TINY = 1e-14  # probability below which states are left out
_UNLIKELY = 1e-9  # expected rows of a round of a batch below which it is left out
_ENDLESS = 2**40  # tokens


# Seconds of a step of a chain of n levels, of all rows of a batch together: of level n drafting so
# many tokens, or another level verifying so many, a pass of one token more.
Seconds: TypeAlias = Callable[[int, int], float]


def constant_seconds(*seconds: float) -> Seconds:
    """Return the seconds of the papers: T_i per pass of M_i, and a pass of M_n per token."""

    def of_step(level: int, tokens: int) -> float:
        return seconds[level - 1] * (tokens if 1 < level == len(seconds) else 1)

    return of_step


class Proposals(NamedTuple):
    """Acceptance of a drafter without a model, which may propose fewer tokens than its window:
    ``[P, K]``, the probability that token j of a proposal at position p is accepted, if the tokens
    before it are, and ``[P]``, its tokens, at most K."""

    accept: Floats
    counts: Ints


@dataclass(frozen=True)
class Acceptance:
    """Probabilities that each level accepts draft tokens from the level below.

    Attributes:
        levels: for level 1 ... n-1, ``[P]``: the probability that it accepts a token at position p,
            if the tokens before it in the block are. P = 1: any position of an endless text.
        remaining: ``[P]``, tokens left of each text from position p on, p included; texts follow
            each other. None: endless.
        proposals: replaces the last of `levels`.
        tail: acceptance of tokens of level n by level 1, ``[P]`` or `Proposals`. None: for chains
            without a tail.
        room: ``[P]``, tokens that the request allows from position p on; more than `remaining` if
            the text ends with an EOS. None: each text is as long as its request allows.
    """

    levels: tuple[Floats, ...]
    remaining: Ints | None = None
    proposals: Proposals | None = None
    tail: Floats | Proposals | None = None
    room: Ints | None = None

    @classmethod
    def constant(cls, *levels: float, tail: float | None = None) -> Acceptance:
        """Return the same acceptance at every position: a_1 ... a_{n-1}, and of a tail."""
        of_tail = None if tail is None else np.array([tail], np.float64)
        return cls(tuple(np.array([a], np.float64) for a in levels), tail=of_tail)


# ---- one round of the target ---------------------------------------------------------------------


class Steps(NamedTuple):
    """A step of `level` in a round that begins at each position P of the texts: ``[P]``, its
    probability, by number of tokens."""

    level: int
    sizes: dict[int, Floats]


Outcomes = dict[int, Floats]  # [P] probability by tokens handed up
Log = dict[tuple[int, ...], Steps]  # by block numbers, from the level of the block downwards
_Ready = dict[tuple[int, int], Floats]  # [P] probability by (pending tokens, tokens of a tail)


class RoundModel:
    """Outcomes of the levels of a chain in a round of the target.

    A verification of m tokens that accepts j hands j + 1 up. Pending tokens can exceed a window,
    and no level between verifies a tail. Arguments as for `expectation`, with a bound of 0 for the
    lowest level that verifies.
    """

    def __init__(
        self,
        windows: Sequence[int],
        rounds: Sequence[int],
        acceptance: Acceptance,
        cost: Seconds,
        tail: int,
    ) -> None:
        self.windows, self.rounds, self.cost = windows, rounds, cost
        self.levels = len(windows) + 1
        self.accept, self.proposals = acceptance.levels, acceptance.proposals
        # As in the state rows, a tail has no more tokens than a draft.
        self.tail = min(tail, windows[-1]) if tail and windows[0] else 0
        self.accept_tail = acceptance.tail
        self.remaining = acceptance.remaining
        self.room = acceptance.remaining if acceptance.room is None else acceptance.room
        self.places = 1 if self.remaining is None else len(self.remaining)
        self.tail_tokens: Floats = np.zeros(self.places)  # [P] expected, after `block(1)`
        self.due = functools.cache(self._due)
        self.rows = functools.cache(self._rows)
        self.block = functools.cache(self._block)

    def ahead(self, values: Floats, tokens: int) -> Floats:
        """Return ``out[p] = values[p + tokens]``."""
        if self.remaining is None or tokens == 0:
            return values
        return np.concatenate([values[tokens:], np.zeros(min(tokens, self.places))])

    def _rows(self, level: int) -> tuple[Ints, Ints]:
        """Return state rows (``polyspec/round_state.hpp``) of the chain from `level` down, a row
        for each number of tokens that the text has room for, and ``[P]``, the row of each position.
        A text that ends with an EOS has room up to the EOS."""
        room = np.array([_ENDLESS], np.int64)
        if self.remaining is not None and self.room is not None:
            room = np.minimum(self.remaining + 1, self.room + 1 - level).clip(1)
        rooms, inverse = np.unique(room, return_inverse=True)
        below = self.levels - level
        shape = _C.RoundShape(below + 1, 0, 0)
        rows = np.zeros((len(rooms), shape.words), np.int64)
        rows[:, shape.ROOM] = rooms
        for number in range(below):
            at = shape.level_at(number + 1)
            rows[:, at + shape.WINDOW] = self.windows[level - 1 + number]
            rows[:, at + shape.BOUND] = self.rounds[level - 1 + number]
        return rows, inverse

    def _due(self, level: int, pending: int, blocks: int, tail: int = 0) -> tuple[Ints, Ints]:
        """Return ``[P]`` each: the level that acts next, and the number of tokens that it drafts or
        verifies, with `pending` tokens in `blocks` blocks for `level` and none for lower levels."""
        rows, inverse = self.rows(level)
        shape = _C.RoundShape(self.levels - level + 1, 0, 0)
        at = shape.level_at(1)
        rows[:, at + shape.PENDING], rows[:, at + shape.BLOCKS] = pending, blocks
        rows[:, shape.TAIL_WINDOW] = tail
        levels, counts = _C.schedule_due(rows, shape.levels)
        return levels[inverse] + level - 1, counts[inverse]

    def _block(self, level: int) -> tuple[Outcomes, Log]:
        """Return outcomes and steps of `level` gathering tokens and verifying once."""
        log: Log = {}
        if level == self.levels:  # the target alone
            ready: _Ready = {(0, 0): np.ones(self.places)}
        elif level == self.levels - 1:
            ready = {}
            self._draft(level, log, ready, np.ones(self.places))
        else:
            ready = self._gather(level, log)
        outcomes: Outcomes = {}
        sizes: dict[int, Floats] = {}
        for (pending, of_tail), chance in ready.items():
            _add(sizes, pending, chance)
            reach = chance
            for j in range(pending + 1):
                passed = np.zeros(self.places)
                if j < pending:
                    passed = reach * self._accepts(level, j, pending - of_tail)
                for emitted, ends in self._emitted(j, reach - passed):
                    _add(outcomes, emitted, ends)
                reach = passed
                if reach.max() <= TINY:
                    break
        log[()] = Steps(level, sizes)
        return outcomes, log

    def _emitted(self, accepted: int, chance: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield the tokens handed up after `accepted`: one more, unless the last is an EOS."""
        if chance.max() <= TINY:
            return
        if self.room is self.remaining or accepted == 0:
            yield accepted + 1, chance
            return
        ends = self.remaining == accepted
        for emitted, mask in ((accepted, ends), (accepted + 1, ~ends)):
            if (chance * mask).max() > TINY:
                yield emitted, chance * mask

    def _accepts(self, level: int, index: int, pending: int) -> Floats:
        """Return the acceptance of token `index` of a block; a tail begins after `pending`."""
        if index >= pending:
            tail = self.accept_tail
            if isinstance(tail, Proposals):
                return self.ahead(tail.accept[:, index - pending], pending)
            assert tail is not None
            return self.ahead(tail, index)
        if level == self.levels - 1 and self.proposals is not None:
            accept: Floats = self.proposals.accept[:, index]
            return accept
        return self.ahead(self.accept[level - 1], index)

    def _draft(
        self,
        level: int,
        log: Log,
        ready: _Ready,
        chance: Floats,
        pending: int = 0,
        blocks: int = 0,
        tail: int = 0,
    ) -> None:
        """Add the draft of level n, where it drafts next, with `chance` ``[P]``, to the tokens
        pending for `level`; `tail`: the draft is a tail of at most `tail` tokens."""
        due, limits = self.due(level, pending, blocks, tail)
        limits = np.where(due == self.levels, limits, 0)
        proposals, drafted = self.accept_tail if tail else self.proposals, limits
        if isinstance(proposals, Proposals):
            counts = self.ahead(proposals.counts.astype(np.float64), pending)
            drafted = np.minimum(limits, counts.astype(np.int64))
        for tokens, count in np.unique(np.stack([limits, drafted]), axis=1).T.tolist():
            mass = chance * ((limits == tokens) & (drafted == count))
            if mass.max() <= TINY:
                continue
            of_tail = count if tail else 0
            if tokens > 0:
                # Rows with an incomplete window draft their next block in the same step.
                path = (blocks, *[0] * (self.levels - 1 - level))
                _add(log.setdefault(path, Steps(self.levels, {})).sizes, tokens, mass)
                self.tail_tokens = self.tail_tokens + mass * of_tail
            _add(ready, (pending + count, of_tail), mass)

    def _gather(self, level: int, log: Log) -> _Ready:
        states: dict[int, Floats] = {0: np.ones(self.places)}  # by tokens pending
        ready: _Ready = {}
        blocks = 0
        while states:
            following: dict[int, Floats] = {}
            for pending, probability in states.items():
                full = self.due(level, pending, blocks)[0] == level
                done = probability * full
                if done.max() > TINY and level == 1 and self.tail:
                    self._draft(level, log, ready, done, pending, blocks, self.tail)
                elif done.max() > TINY:
                    _add(ready, (pending, 0), done)
                going = probability * ~full
                if going.max() <= TINY:
                    continue
                outcomes, inner = self.block(level + 1)
                for path, step in inner.items():
                    sizes = log.setdefault((blocks, *path), Steps(step.level, {})).sizes
                    for size, chance in step.sizes.items():
                        _add(sizes, size, going * self.ahead(chance, pending))
                for emitted, chance in outcomes.items():
                    after = going * self.ahead(chance, pending)
                    if after.max() > TINY:
                        _add(following, pending + emitted, after)
            states, blocks = following, blocks + 1
        return ready


def _add(sums: dict[_Key, Floats], key: _Key, chance: Floats) -> None:
    sums[key] = sums[key] + chance if key in sums else chance


# ---- whole texts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expectation:
    """Expected numbers for recorded texts; for an endless text, of a round of the target.

    Attributes:
        rounds: ``[G]``, rounds of each batch, summed over its rows.
        tokens: ``[G]``, committed tokens.
        steps: ``[G, n]``, verifications of level 1 ... n-1 and drafts of level n, summed over rows.
        batch_steps: ``[G, n]``, the same with a step of several rows counted once.
        seconds: ``[G, n]``, seconds of these steps.
        verified: ``[n - 1]``, tokens verified per round of a row by level 1 ... n-1.
        tail: tokens of a tail among the tokens verified by level 1.
        before: ``[G]``, seconds before the first round, not in `seconds`.
    """

    rounds: Floats
    tokens: Floats
    steps: Floats
    batch_steps: Floats
    seconds: Floats
    verified: Floats
    tail: float = 0.0
    before: Floats | float = 0.0

    @property
    def length(self) -> float:
        """Committed tokens per row and round of the target; tau."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, of the whole batch."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def whole_tokens_per_second(self) -> float:
        """Tokens per second of whole calls."""
        return float(self.tokens.sum() / (self.seconds.sum() + np.sum(self.before)))


def expectation(
    windows: Sequence[int],
    rounds: Sequence[int],
    acceptance: Acceptance,
    seconds: Seconds,
    batch: int = 1,
    tail: int = 0,
) -> Expectation:
    """Return the expected tokens, steps and seconds of a chain.

    Args:
        windows: windows of level 1 ... n-1. Empty: the target alone.
        rounds: ``rounds[i]`` bounds the blocks that level i+1 waits for; 0: no bound. For every
            level above the lowest that verifies.
        batch: rows. Texts fill batches in their order; the first texts fill up the last batch.
            Rows wait for each other: a step is taken if any row takes part, in the time of the row
            with the most tokens, and rounds of the target are common to all rows. Rows accept
            independently.
        tail: maximum number of tokens that level n adds to a block of the target, as for `Chain`.

    Raises:
        ValueError: `windows` and `rounds` or `acceptance` do not match; `batch` < 1; a tail with
            fewer than three levels or without its acceptance.
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
    chain = RoundModel(windows, (*rounds, 0), acceptance, seconds, tail)
    outcomes, log = chain.block(1)
    begins = starts(chain.remaining)
    visits = _visits(chain, outcomes, begins)
    weight = visits.sum(0)
    total = float(weight.sum())

    def by_text(values: Floats) -> Floats:
        return np.asarray(np.add.reduceat(weight * values, begins))

    done, tokens = by_text(np.ones(chain.places)), np.zeros(len(begins))
    for emitted, chance in outcomes.items():
        tokens += emitted * by_text(chance)
    steps, spent = np.zeros((2, len(begins), count + 1))
    verified = np.zeros(count + 1)
    for step in log.values():
        for size, chance in step.sizes.items():
            times = by_text(chance)
            steps[:, step.level - 1] += times
            spent[:, step.level - 1] += times * chain.cost(step.level, size)
            verified[step.level - 1] += float(times.sum()) * size / total
    of_tail = float(weight @ chain.tail_tokens) / total
    shared = steps
    if batch > 1:
        rows = batches(len(begins), batch)
        ends = [*begins[1:].tolist(), chain.places]
        texts = [slice(*bounds) for bounds in zip(begins.tolist(), ends, strict=True)]
        together = [_together(chain, log, visits, [texts[n] for n in row]) for row in rows]
        shared, spent = (np.array(column) for column in zip(*together, strict=True))
        done, tokens, steps = (values[rows].sum(1) for values in (done, tokens, steps))
    return Expectation(done, tokens, steps, shared, spent, verified[:-1], of_tail)


def batches(texts: int, batch: int) -> Ints:
    """Return ``[G, batch]``, the indices of the texts of every batch, in order; the first texts
    fill up the last batch."""
    return np.arange(-(-texts // batch) * batch).reshape(-1, batch) % texts


def starts(remaining: Ints | None) -> Ints:
    """Return the first position of each text."""
    if remaining is None:
        return np.zeros(1, np.int64)
    return np.flatnonzero(np.append(True, remaining[1:] >= remaining[:-1]))


def _together(
    chain: RoundModel, log: Log, visits: Floats, texts: Sequence[slice]
) -> tuple[Floats, Floats]:
    """Return ``[n]`` each, the steps of a batch of `texts`, and their seconds."""
    active = sum(visits[:, text].sum(1) for text in texts)
    count = int((active > _UNLIKELY).sum())
    done, spent = np.zeros((2, chain.levels))
    for step in log.values():
        sizes = sorted(step.sizes)
        # The probability that no row takes part with more tokens than each size; first: at all.
        below = np.ones((count, len(sizes) + 1))
        for text in texts:
            chances = [visits[:count, text] @ step.sizes[size][text] for size in sizes]
            reach = np.cumsum(np.stack(chances, 1), 1)
            nothing = np.maximum(0.0, 1 - reach[:, -1:])
            below *= np.concatenate([nothing, nothing + reach], 1)
        largest = np.diff(below, axis=1).sum(0)
        done[step.level - 1] += largest.sum()
        spent[step.level - 1] += largest @ [chain.cost(step.level, size) for size in sizes]
    return done, spent


def _visits(chain: RoundModel, outcomes: Outcomes, begins: Ints) -> Floats:
    """Return ``[R, P]``, the probability that round r of a text begins at position p. An endless
    text has a single position."""
    if chain.remaining is None:
        return np.ones((1, 1))
    now = np.zeros(chain.places)
    now[begins] = 1.0
    rounds = []
    while now.max() > TINY:
        rounds.append(now)
        after = np.zeros(chain.places)
        for emitted, chance in outcomes.items():
            after[emitted:] += (now * chance)[: max(0, chain.places - emitted)]
        after[begins] = 0.0  # the text before is complete
        now = after
    return np.stack(rounds)
