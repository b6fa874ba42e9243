"""What a chain costs per token, exactly, where acceptances are independent of each other: a renewal
process whose cycles are the rounds of the target (`rounds`).

Acceptances may be one number per level (an endless text, its steady state), or be given at every
position of recorded texts. Where such a text ends with an EOS no block goes beyond it: a level that
proposes another token there, and more behind it, is rejected at that place anyhow. Along a text
drawn from the target's distribution p, a token that was tested was accepted with probability min(1,
q/p) at that very token, whatever windows the chain had (its text does not depend on them, contract
C2), so such a replay is exact for two levels. For more, the levels below are taken to accept as
they would along the same text, also behind a token that the target rejects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .acceptance import Acceptance, PassSeconds
from .lengths import Floats, Ints
from .rounds import Lags, Log, Outcomes, RoundModel

_UNLIKELY = 1e-9  # rounds of a batch


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

    def of_batches(self, numbers: Sequence[int]) -> Expectation:
        """The same of some of the batches, of each as often as it stands there; `verified` and
        `tail` stay means over all."""
        some = np.array(numbers, np.int64)
        names = ("rounds", "tokens", "steps", "batch_steps", "seconds")
        return replace(self, **{name: getattr(self, name)[some] for name in names})

    def emitted(self, level: int) -> float:
        """Tokens handed up per verification of `level`; L_i for the target."""
        if level == 1:
            return self.length
        counts = self.steps.sum(0)
        pending = self.verified[level - 2] - (self.tail if level == 2 else 0.0)
        above = float(pending * self.rounds.sum())
        return above / float(counts[level - 1]) if counts[level - 1] else float("nan")


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
    chain = RoundModel(windows, (*rounds, 0), acceptance, seconds, batch, tail, unread)
    begin: Lags = (1,) * count
    known: dict[Lags, tuple[Outcomes, Log]] = {}
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


def batches(texts: int, batch: int) -> Ints:
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
    chain: RoundModel, logs: Sequence[Log], rows: Sequence[tuple[int, Floats]]
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


def _starts(remaining: Ints | None) -> Ints:
    if remaining is None:
        return np.zeros(1, np.int64)
    return np.flatnonzero(np.append(True, remaining[1:] >= remaining[:-1]))


def _moves(
    chain: RoundModel, known: dict[Lags, tuple[Outcomes, Log]], order: Sequence[Lags]
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
    chain: RoundModel, known: dict[Lags, tuple[Outcomes, Log]], order: Sequence[Lags]
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
    chain: RoundModel, known: dict[Lags, tuple[Outcomes, Log]], order: Sequence[Lags]
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
