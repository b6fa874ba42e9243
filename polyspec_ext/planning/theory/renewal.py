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

from .acceptance import Acceptance, Floats, Ints, PassSeconds
from .rounds import TINY, Log, Outcomes, RoundModel

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
        before: ``[G]``, seconds before the first round, which are in no other number.
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
        """Tokens committed per row and round of the target; tau."""
        return float(self.tokens.sum() / self.rounds.sum())

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, of the whole batch."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def whole_tokens_per_second(self) -> float:
        """Of whole calls."""
        return float(self.tokens.sum() / (self.seconds.sum() + np.sum(self.before)))

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
    chain = RoundModel(windows, (*rounds, 0), acceptance, seconds, batch, tail)
    outcomes, log = chain.block(1, False)
    begins = starts(chain.remaining)
    visits = _visits(chain, outcomes, begins)
    weight = visits.sum(0)
    total = float(weight.sum())

    def by_text(values: Floats) -> Floats:
        found: Floats = np.add.reduceat(weight * values, begins)
        return found

    done, tokens = by_text(np.ones(chain.places)), np.zeros(len(begins))
    for emitted, chance in outcomes.items():
        tokens += emitted * by_text(chance)
    steps, spent = np.zeros((2, len(begins), count + 1))
    verified = np.zeros(count + 1)  # the last: of tails
    for step in log.values():
        steps[:, step.level - 1] += by_text(step.part)
        spent[:, step.level - 1] += by_text(step.seconds)
        verified[step.level - 1] += float(weight @ step.verified) / total
    of_tails = float(verified[-1])
    if batch == 1:
        return Expectation(done, tokens, steps, steps, spent, verified[:-1], of_tails)
    rows = batches(len(begins), batch)
    ends = [*begins[1:].tolist(), chain.places]
    texts = [slice(*both) for both in zip(begins.tolist(), ends, strict=True)]
    together = [_together(chain, log, visits, [texts[n] for n in own]) for own in rows]
    return Expectation(
        done[rows].sum(1),
        tokens[rows].sum(1),
        steps[rows].sum(1),
        np.array([own for own, _ in together]),
        np.array([own for _, own in together]),
        verified[:-1],
        of_tails,
    )


def batches(texts: int, batch: int) -> Ints:
    """``[G, batch]``, the texts of every batch: so many at a time in their order, and the first
    ones again where the last batch is short of some."""
    return np.arange(-(-texts // batch) * batch).reshape(-1, batch) % texts


def _slots(active: Iterable[float], batch: int) -> list[int]:
    """Rows in the caches by round, out of how many are not complete (`Engine.leave`)."""
    found, now = [], batch
    for some in active:
        if 4 * some <= 3 * now:
            now = max(1, round(some))
        found.append(now)
    return found


def _together(
    chain: RoundModel, log: Log, visits: Floats, texts: Sequence[slice]
) -> tuple[Floats, Floats]:
    """``[n]`` each, steps of a batch of these texts, and seconds spent in them."""
    active = sum(visits[:, own].sum(1) for own in texts)
    count = int((active > _UNLIKELY).sum())
    slots = np.array(_slots(active[:count], chain.batch))
    done, spent = np.zeros((2, chain.levels))
    for path, step in log.items():
        sizes = sorted(step.sizes)
        # The probability that no row has a larger part in the step than each size; first: none.
        below = np.ones((count, len(sizes) + 1))
        for own in texts:
            parts = [visits[:count, own] @ step.sizes[size][own] for size in sizes]
            reach = np.cumsum(np.stack(parts, 1), 1)
            nothing = np.maximum(0.0, 1 - reach[:, -1:])
            below *= np.concatenate([nothing, nothing + reach], 1)
        largest = np.diff(below, axis=1)
        done[step.level - 1] += largest.sum()
        for rows in set(slots.tolist()):
            costs = np.array([chain.cost(path, step.level, size, rows) for size in sizes])
            spent[step.level - 1] += float((largest[slots == rows] @ costs).sum())
    return done, spent


def starts(remaining: Ints | None) -> Ints:
    """Where each text begins, of texts that stand one behind the other."""
    if remaining is None:
        return np.zeros(1, np.int64)
    return np.flatnonzero(np.append(True, remaining[1:] >= remaining[:-1]))


def _visits(chain: RoundModel, outcomes: Outcomes, begins: Ints) -> Floats:
    """``[R, P]``, the probability that round r of a text begins at a position; of an endless text,
    every round does at its only one."""
    if chain.remaining is None:
        return np.ones((1, 1))
    now = np.zeros(chain.places)
    now[begins] = 1.0
    found = []
    while now.max() > TINY:
        found.append(now)
        after = np.zeros(chain.places)
        for emitted, chance in outcomes.items():
            after[emitted:] += (now * chance)[: max(0, chain.places - emitted)]
        after[begins] = 0.0  # the text before is complete
        now = after
    return np.stack(found)
