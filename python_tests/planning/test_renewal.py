"""The renewal model against the scheduler's state rows."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyspec_ext.planning import theory
from polyspec_ext.runtime.rows import StateRows
from polyspec_ext.tensors import Plan

PROMPT = 2
EOS = 1  # in a text with room after its end; every level has EOS there


class RandomSeconds:
    """Another number for every step that differs in anything; of wide steps a higher one."""

    def __init__(self) -> None:
        generator = np.random.default_rng(5)
        self.known: dict[tuple[int, ...], float] = defaultdict(generator.random)

    def __call__(self, level: int, tokens: int) -> float:
        return self.known[level, tokens]


class Step(NamedTuple):
    """Tokens of each row that takes part; its time is that of the row with the most."""

    level: int
    rows: tuple[int, ...]
    of_tail: int = 0  # of the tokens of all rows


class Rows:
    """State rows of the runtime, walked through with the probability of every outcome."""

    def __init__(self, windows, rounds, *texts, tail=0) -> None:
        self.levels, self.texts = len(windows) + 1, texts
        lengths = [len(text.remaining) for text in texts if text.remaining is not None]
        self.lengths = lengths
        batch, longest = len(lengths), max(lengths)
        self.state = StateRows(self.levels, batch, 1, 64 + longest)
        rows: list[Any] = [
            SimpleNamespace(tokens=[0] * PROMPT, room=length, request=SimpleNamespace(eos=()))
            if text.room is None
            else SimpleNamespace(
                tokens=[0] * PROMPT,
                room=int(text.room[0]),
                request=SimpleNamespace(eos=(EOS,)),
            )
            for text, length in zip(texts, lengths, strict=True)
        ]
        before = StateRows(self.levels, batch)
        for level in range(1, self.levels + 1):
            before.set_cached(level, [PROMPT - 1] * batch)
        for slot in range(batch):
            before.set_windows(slot, [*windows, *rounds, 0])
        self.state.write(rows, before, tail)

    def steps(self) -> Iterator[tuple[float, Step]]:
        todo = {self._key(): (self.state.words.clone(), 1.0)}
        while todo:
            words, weight = todo.pop(next(iter(todo)))
            self.state.words.copy_(words)
            step = self.state.next()
            if step is None:
                continue
            level, draft = step.level, step.level == self.levels
            plan = Plan(*step.table.tolist())
            group = [row for row, part in enumerate(plan.part) if part]
            rows = tuple(plan.lengths[row] for row in group)
            if draft:  # no further than to an EOS
                ends = [self.lengths[row] - plan.positions[row] + PROMPT for row in group]
                rows = tuple(map(min, rows, ends))
            yield weight, Step(level, rows, sum(plan.of_tail))
            options = [
                self._outcomes(
                    row, level, plan.positions[row] - PROMPT, plan.lengths[row], plan.of_tail[row]
                )
                if row in group
                else [(0, 1.0)]
                for row in range(len(self.texts))
            ]
            for outcome in itertools.product(*options):
                self.state.words.copy_(words)
                step = self.state.next()  # it is reported once
                counts = [count for count, _ in outcome]
                tokens = torch.zeros(len(counts), max(*counts, 0) + 1, dtype=torch.int64)
                for row, text in enumerate(self.texts):
                    end = self.lengths[row] - 1 - (plan.positions[row] - PROMPT)
                    if text.room is not None and 0 <= end < tokens.shape[1]:
                        tokens[row, end] = EOS
                status = torch.zeros(tokens.shape if draft else len(counts), dtype=torch.int32)
                self.state.report(step, tokens, torch.tensor(counts), status)
                key = self._key()
                _, before = todo.get(key, (None, 0.0))
                chance = weight * float(np.prod([chance for _, chance in outcome]))
                todo[key] = self.state.words.clone(), before + chance

    def _key(self) -> tuple[Any, ...]:
        shape, words = self.state.shape, self.state.words
        words[:, shape.STEP] = 0
        for level in range(1, self.levels + 1):
            words[:, shape.level_at(level) + shape.ROUND] = 0
        return tuple(words[:, : shape.log_at].flatten().tolist())

    def _outcomes(self, row, level, place, length, of_tail) -> list[tuple[int, float]]:
        proposals, tail = self.texts[row].proposals, self.texts[row].tail
        if level == self.levels:
            given = tail if of_tail else proposals
            most = given.counts[place] if isinstance(given, theory.Proposals) else length
            return [(min(length, most), 1.0)]
        end = place + length - of_tail
        accept = self.texts[row].levels[level - 1][place:end]
        if level == self.levels - 1 and proposals is not None:
            accept = proposals.accept[place, :length]
        if of_tail:
            more = tail[end:] if isinstance(tail, np.ndarray) else tail.accept[end]
            accept = np.concatenate([accept, more[:of_tail]])
        chances = accepted_distribution(accept.tolist())
        return [(j, p) for j, p in enumerate(chances.tolist()) if p > 0]


def accepted_distribution(accept: Sequence[float]) -> Any:
    """Return ``[m + 1]``, the probability that exactly j of m tokens are accepted."""
    reach = np.cumprod([1.0, *accept])
    return reach - np.append(reach[1:], 0.0)


def random_acceptance(levels, length, *, proposals=False, room=None) -> theory.Acceptance:
    """Of one text; room: of the request, beyond which an EOS ends it."""
    rng = np.random.default_rng(7)
    given = None
    if proposals:
        given = theory.Proposals(rng.random((length, 8)), rng.integers(0, 5, length))
    accept = tuple(0.3 + 0.7 * rng.random(length) for _ in range(levels - 1))
    tail: Any = 0.3 + 0.7 * rng.random(length)
    if proposals:
        tail = theory.Proposals(rng.random((length, 8)), rng.integers(0, 4, length))
    left = None if room is None else np.arange(room, room - length, -1)
    return theory.Acceptance(accept, np.arange(length, 0, -1), given, tail, left)


@st.composite
def chains(draw: st.DrawFn, most: int) -> tuple[list[int], list[int], int]:
    """Return windows of at most `most` tokens in all, bounds of rounds and a tail."""
    count = draw(st.integers(0, 2))
    window = st.integers(0, most // (1 + count))
    windows = draw(st.lists(window, min_size=1 + count, max_size=1 + count))
    rounds = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return windows, rounds, draw(st.sampled_from([0, 0, 1, 2, 9])) if count else 0


def test_texts_one_behind_the_other_are_apart() -> None:
    one, seconds = random_acceptance(3, 13), RandomSeconds()
    short = cut(one, 9)
    found = theory.expectation((5, 3), (2,), behind(one, short), seconds)
    for at, text in enumerate((one, short)):
        alone = theory.expectation((5, 3), (2,), text, seconds)
        assert found.steps[at] == pytest.approx(alone.steps[0])
        assert found.seconds[at] == pytest.approx(alone.seconds[0])
        assert found.rounds[at] == pytest.approx(alone.rounds[0])


@pytest.mark.parametrize(
    ("windows", "rounds", "tail"),
    [((4,), (), 0), ((5, 3), (2,), 0), ((5, 2, 2), (2, 0), 0), ((4, 2), (0,), 2)],
)
def test_an_endless_text_is_the_limit_of_long_ones(windows, rounds, tail) -> None:
    accept = (0.8, 0.7, 0.6)[: len(windows)]
    seconds = RandomSeconds()
    everywhere = theory.Acceptance.constant(*accept, tail=0.5)
    endless = theory.expectation(windows, rounds, everywhere, seconds, tail=tail)

    def spent(length: int) -> float:
        long = theory.Acceptance(
            tuple(np.full(length, a) for a in accept),
            np.arange(length, 0, -1),
            tail=np.full(length, 0.5),
        )
        return float(theory.expectation(windows, rounds, long, seconds, tail=tail).seconds.sum())

    each = (spent(700) - spent(400)) / 300
    assert 1 / endless.tokens_per_second == pytest.approx(each, rel=1e-9)


def test_rows_of_a_batch_wait_for_each_other() -> None:
    acceptance = theory.Acceptance.constant(0.8, 0.5)
    costs = theory.constant_seconds(10, 3, 1)
    one = theory.expectation((5, 3), (3,), acceptance, costs)
    many = theory.expectation((5, 3), (3,), acceptance, costs, batch=4)

    def round_seconds(found: theory.Expectation) -> float:
        return float(found.seconds.sum() / found.batch_steps[:, 0].sum())

    # Blocks of 1 ... 4 tokens until 5 are there, three at most: by hand.
    blocks = accepted_distribution([0.5] * 3)
    needed: dict[int, float] = defaultdict(float)
    for sizes in itertools.product(range(1, 5), repeat=3):
        chance = float(np.prod([blocks[size - 1] for size in sizes]))
        count = next((n for n in (1, 2) if sum(sizes[:n]) >= 5), 3)
        needed[count] += chance
    assert round_seconds(one) == pytest.approx(10 + sum(n * p for n, p in needed.items()) * 6)
    most = sum(1 - sum(p for n, p in needed.items() if n <= k) ** 4 for k in range(3))
    assert round_seconds(many) == pytest.approx(10 + most * 6)
    assert many.tokens_per_second == pytest.approx(4 * one.length / round_seconds(many))


def combined(how: Any, *texts: theory.Acceptance) -> theory.Acceptance:
    """Apply a function to the arrays of texts with the same parts."""

    def each(*parts: Any) -> Any:
        if isinstance(parts[0], theory.Proposals):
            return theory.Proposals(*map(how, *parts))
        return None if parts[0] is None else how(*parts)

    levels = tuple(map(how, *(text.levels for text in texts)))
    names = ("remaining", "proposals", "tail", "room")
    return theory.Acceptance(levels, *(each(*(getattr(t, n) for t in texts)) for n in names))


def cut(text: theory.Acceptance, length: int) -> theory.Acceptance:
    return combined(lambda part: part[-length:], text)


def behind(one: theory.Acceptance, other: theory.Acceptance) -> theory.Acceptance:
    return combined(lambda *parts: np.concatenate(parts), one, other)


@settings(max_examples=50)
@given(
    st.one_of(st.tuples(chains(8), st.just(1)), st.tuples(chains(4), st.just(2))),
    st.booleans(),
    st.sampled_from([None, None, 1, 2, 30]),
)
def test_batches_take_the_steps_of_the_state_rows(chain, proposals, more) -> None:
    """Rows of other acceptance and length; a step takes the time of the longest. `more`: tokens
    that the request allows after an EOS at the end; None: none is there."""
    (windows, rounds, tail), batch = chain
    lengths = [9 - len(windows)] if batch == 1 else [5, 4]
    room = None if more is None else 9 + more
    whole = random_acceptance(len(windows) + 1, 9, proposals=proposals, room=room)
    texts = [cut(whole, length) for length in lengths]
    seconds = RandomSeconds()
    found = theory.expectation(windows, rounds, reduce(behind, texts), seconds, batch, tail)
    steps, own, verified = np.zeros((3, len(windows) + 1))
    of_tails = spent = 0.0
    for weight, step in Rows(windows, rounds, *texts, tail=tail).steps():
        at = step.level - 1
        steps[at] += weight
        own[at] += weight * len(step.rows)
        verified[at] += weight * sum(step.rows)
        of_tails += 0.0 if at else weight * step.of_tail
        spent += weight * seconds(step.level, max(step.rows))
    assert found.tokens == pytest.approx([sum(lengths)])
    assert found.batch_steps[0] == pytest.approx(steps, abs=1e-9)
    assert found.steps[0] == pytest.approx(own, abs=1e-9)
    assert found.rounds[0] == pytest.approx(own[0], abs=1e-9)
    assert found.verified * own[0] == pytest.approx(verified[:-1], abs=1e-9)
    assert found.tail * own[0] == pytest.approx(of_tails, abs=1e-9)
    assert found.seconds.sum() == pytest.approx(spent, rel=1e-9)
    assert found.tokens_per_second == pytest.approx(sum(lengths) / spent, rel=1e-9)


def test_the_target_alone() -> None:
    alone = theory.expectation((), (), theory.Acceptance(()), theory.constant_seconds(0.25))
    assert alone.tokens_per_second == 4
    texts = theory.Acceptance((), np.array([3, 2, 1, 2, 1]))
    found = theory.expectation((), (), texts, theory.constant_seconds(0.25))
    assert found.seconds.sum(1).tolist() == [0.75, 0.5]


def test_what_does_not_fit() -> None:
    seconds = theory.constant_seconds(1, 1)
    with pytest.raises(ValueError, match="acceptance: expected one for each of 2 levels"):
        theory.expectation((2, 2), (1,), theory.Acceptance.constant(0.5), seconds)
    with pytest.raises(ValueError, match="rounds: expected 0 numbers"):
        theory.expectation((2,), (1,), theory.Acceptance.constant(0.5), seconds)
    one, two = theory.Acceptance.constant(0.5), theory.Acceptance.constant(0.5, 0.5)
    with pytest.raises(ValueError, match="tail: expected 0 for 2 levels, given 1"):
        theory.expectation((2,), (), one, seconds, tail=1)
    with pytest.raises(ValueError, match="tail: expected 0 or more for 3 levels, given -1"):
        theory.expectation((2, 2), (0,), two, seconds, tail=-1)
    with pytest.raises(ValueError, match="acceptance: expected that of a tail as well, given none"):
        theory.expectation((2, 2), (0,), two, seconds, tail=1)
    with pytest.raises(ValueError, match="batch: expected 1 or more, given 0"):
        theory.expectation((2,), (), theory.Acceptance.constant(0.5), seconds, batch=0)
