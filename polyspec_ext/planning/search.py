"""Chains of the parts at hand: which windows suit each, and what it would give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..stats import Stats
from .measure import OWN, Measured, MeasuredSeconds
from .parts import Part, owners_above
from .runs import MOST, MOST_ABOVE
from .theory import (
    Acceptance,
    Expectation,
    InsertionTest,
    Proposals,
    expectation,
    insertion_test,
    starts,
)

_PLACES = 400  # of texts that windows are chosen on
LONGEST = 4  # levels of a chain: more of them are many more chains, of which few are tried
_TRIALS = 200  # settings tried for one chain
_EXTRA = (0, 1, None)  # rounds beyond those that fill a window; None: unbounded


@dataclass(frozen=True)
class LevelWork:
    """What one level of a chain does for a token of the text.

    Attributes:
        steps: verifications per token of the text; of the lowest level: drafts.
        tokens: tokens verified per token of the text; of the lowest level: drafted.
        length: tokens handed up per verification (L_i); None of the lowest level.
        seconds: per token of the text, without the chain's own time.
    """

    steps: float
    tokens: float
    length: float | None
    seconds: float


@dataclass(frozen=True)
class Work:
    """What a chain does for a token of the text, level by level; `own` is the time outside the
    levels, in seconds per token."""

    levels: tuple[LevelWork, ...]
    own: float


def expected_work(found: Expectation, times: MeasuredSeconds) -> Work:
    """Of a prediction with these times."""
    tokens = float(found.tokens.sum())
    steps, seconds = found.steps.sum(0) / tokens, found.seconds.sum(0) / tokens
    outside = times.own(found.batch_steps).sum(0)
    outside[0] += times.measured.first.get(OWN, 0.0) * times.scale[OWN] * len(found.tokens)
    outside /= tokens
    verified = found.verified * float(found.rounds.sum()) / tokens
    count = len(steps)
    of_tails = found.tail * float(found.rounds.sum()) / tokens
    drafted = [*verified, verified[-1] + of_tails if len(verified) else 0.0]
    lengths = [found.emitted(level) for level in range(1, max(count, 2))]
    levels = [
        LevelWork(float(step), float(many), length, float(spent))
        for step, many, length, spent in zip(
            steps, drafted, [*lengths, None], seconds - outside, strict=False
        )
    ]
    return Work(tuple(levels), float(outside.sum()))


def observed_work(stats: Stats) -> Work:
    """Of requests that were run."""
    tokens = stats.num_new_tokens
    levels = []
    for number, level in enumerate(stats.levels):
        lowest = number > 0 and number == len(stats.levels) - 1
        steps = level.num_proposals if lowest else level.num_verifications
        many = level.num_proposed_tokens if lowest else level.num_draft_tokens
        length = None if lowest else level.num_emitted_tokens / max(steps, 1)
        levels.append(LevelWork(steps / tokens, many / tokens, length, level.seconds / tokens))
    return Work(tuple(levels), stats.overhead_seconds / tokens)


@dataclass(frozen=True)
class Candidate:
    """A chain, what is predicted for it, and what was measured.

    Attributes:
        parts: numbers of its parts, target first.
        levels: their names.
        windows, rounds, rule, tail: as `Chain` takes them.
        predicted_tokens_per_second: of whole calls, prefills and all: what `Chain.generate` gives.
        predicted_decode_tokens_per_second: of decoding alone, as `Stats.tokens_per_second`.
        uncertainty: relative; twice the standard error: of the chain's own trial over its rounds,
            where there was one, else from the spread of the texts and of the times of steps.
        measured_tokens_per_second, measured_decode_tokens_per_second: where it was run; medians.
        measured_repeats: decoding's, of each repeat.
        length: tokens per round of the target; `measured_length` where it was run.
        work: what each level does; `measured_work` where it was run.
    """

    parts: tuple[int, ...]
    levels: tuple[str, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    predicted_tokens_per_second: float
    predicted_decode_tokens_per_second: float
    uncertainty: float
    length: float
    work: Work
    rule: str = "token"
    tail: int = 0
    measured_tokens_per_second: float | None = None
    measured_decode_tokens_per_second: float | None = None
    measured_repeats: tuple[float, ...] = ()
    measured_length: float | None = None
    measured_work: Work | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.measured_tokens_per_second is None:
            return None
        return self.predicted_tokens_per_second / self.measured_tokens_per_second - 1


def chains(parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    """Every chain of at most `LONGEST` of the parts in their order: the target, any that verify,
    and at most one that only drafts."""
    models = [n for n, part in enumerate(parts) if part.verifies and n > 0]
    drafters = [n for n, part in enumerate(parts) if not part.verifies and n > 0]
    for count in range(min(len(models), LONGEST - 1) + 1):
        for some in itertools.combinations(models, count):
            if not owners_above([parts[n] for n in (0, *some)]):
                continue
            yield (0, *some)
            above = (0, *some)[-1]
            for last in drafters if count < LONGEST - 1 else ():
                if parts[last].drafts_below(parts[above], parts[0]):
                    yield (0, *some, last)


def candidates(measured: Measured, parts: Sequence[Part]) -> list[Candidate]:
    """Each chain with the windows that suit it best, the fastest first."""
    found = []
    for chain in chains(parts):
        setting = best_setting(measured, chain, tails=not parts[chain[-1]].trees)
        found.append(candidate(measured, parts, chain, *setting))
    return sorted(found, key=lambda one: -one.predicted_tokens_per_second)


def candidate(
    measured: Measured,
    parts: Sequence[Part],
    chain: tuple[int, ...],
    windows: tuple[int, ...],
    rounds: tuple[int, ...],
    tail: int = 0,
) -> Candidate:
    """The prediction for one chain."""
    names = tuple(parts[n].name for n in chain)
    found = predict(measured, chain, windows, rounds, tail=tail)
    return Candidate(
        chain,
        names,
        windows,
        rounds,
        found.whole_tokens_per_second,
        found.tokens_per_second,
        _uncertainty(measured, chain, found),
        found.length,
        expected_work(found, MeasuredSeconds(measured, chain)),
        tail=tail,
    )


def predict(
    measured: Measured,
    chain: Sequence[int],
    windows: Sequence[int],
    rounds: Sequence[int],
    factors: Mapping[int, float] | None = None,
    rejected: Mapping[tuple[int, int], float] | None = None,
    places: int | None = None,
    tail: int = 0,
) -> Expectation:
    """What the renewal model expects of a chain on the measured texts, the first steps of a call
    and what comes before them included.

    Args:
        factors: of parts' times, as `MeasuredSeconds` has them.
        rejected: by pair of parts, the factor of the probability of a rejection.
        places: only the texts within the first so many positions, whole batches of them.
        tail: as `Chain` takes it.
    """
    acceptance = measured.acceptance(chain, *windows[-1:])
    if rejected:
        pairs = list(itertools.pairwise(chain))
        factor = [rejected.get(pair, 1.0) for pair in pairs]
        of_tail = rejected.get((chain[0], chain[-1]), 1.0)
        acceptance = replace(
            acceptance,
            levels=tuple(map(_scaled, acceptance.levels, factor)),
            proposals=_scaled(acceptance.proposals, factor[-1]) if pairs else None,
            tail=_scaled(acceptance.tail, of_tail),
        )
    if places is not None:
        acceptance = _first(acceptance, places, measured.batch)
    seconds = MeasuredSeconds(measured, chain, factors or {})
    found = expectation(windows, rounds, acceptance, seconds, measured.batch, tail)
    own, count = seconds.own(found.batch_steps), len(found.tokens)
    by_context = measured.context_factors(chain)[:count]
    spent = own + (found.seconds - own) * by_context + seconds.first()
    more = measured.steps_factors(chain)
    return replace(
        found,
        rounds=found.rounds * more[0],
        steps=found.steps * more,
        batch_steps=found.batch_steps * more,
        seconds=spent * more,
        verified=found.verified * more[:-1] / more[0],
        before=seconds.before()[:count],
    )


def _scaled(accept: Any, factor: float) -> Any:
    if isinstance(accept, Proposals):
        return Proposals(_scaled(accept.accept, factor), accept.counts)
    return None if accept is None else np.clip(1 - (1 - accept) * factor, 0, 1)


def _first(acceptance: Acceptance, places: int, batch: int) -> Acceptance:
    remaining = acceptance.remaining
    assert remaining is not None
    begins = starts(remaining)
    texts = -(-int(np.searchsorted(begins, places // 2)) // batch) * batch
    if len(remaining) <= places or texts >= len(begins):
        return acceptance
    cut = int(begins[texts])

    def first(values: Any) -> Any:
        if isinstance(values, Proposals):
            return Proposals(*map(first, values))
        return None if values is None else values[:cut]

    others = (remaining, acceptance.proposals, acceptance.tail, acceptance.room)
    return Acceptance(tuple(map(first, acceptance.levels)), *map(first, others))


class Setting(NamedTuple):
    """Of a chain, as `Chain` takes it."""

    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    tail: int = 0


def best_setting(measured: Measured, chain: Sequence[int], *, tails: bool = True) -> Setting:
    """The setting with the most tokens per second; of two levels by trying all windows, of more by
    changing one number after another until none helps.

    Args:
        tails: whether the chain may have one; a drafter of trees has none.
    """
    count = len(chain) - 1
    if count == 0:
        return Setting((), ())
    known: dict[Setting, float] = {}

    def rate(sizes: Sequence[int], extra: Sequence[int | None]) -> float:
        *windows, tail = sizes
        one = Setting(tuple(windows), _rounds(windows, extra), min(tail, windows[-1]))
        if one not in known:
            found = predict(measured, chain, one.windows, one.rounds, places=_PLACES, tail=one.tail)
            known[one] = found.tokens_per_second
        return known[one]

    if count == 1:
        for window in range(1, MOST + 1):
            rate((window, 0), ())
        return max(known, key=known.__getitem__)
    sizes = (*(min(3 * 2**i, MOST) for i in reversed(range(count))), 0)  # windows, and the tail
    extra: tuple[int | None, ...] = (1,) * (count - 1)
    best, moved = rate(sizes, extra), True
    while moved and len(known) < _TRIALS:
        moved = False
        for place, step in itertools.product(range(count + tails), (1, -1, 3, -3)):
            size = sizes[place] + step
            largest = (*[MOST_ABOVE] * (count - 1), MOST, sizes[count - 1])[place]
            if not (1 if place < count else 0) <= size <= largest:
                continue
            other = (*sizes[:place], size, *sizes[place + 1 :])
            if rate(other, extra) > best:
                sizes, best, moved = other, rate(other, extra), True
        for place, more in itertools.product(range(count - 1), _EXTRA):
            choice = (*extra[:place], more, *extra[place + 1 :])
            if rate(sizes, choice) > best:
                extra, best, moved = choice, rate(sizes, choice), True
    return max(known, key=known.__getitem__)


def _rounds(windows: Sequence[int], extra: Sequence[int | None]) -> tuple[int, ...]:
    pairs = itertools.pairwise(windows)
    return tuple(
        0 if more is None else -(-window // (below + 1)) + more
        for (window, below), more in zip(pairs, extra, strict=True)
    )


def _uncertainty(measured: Measured, chain: Sequence[int], found: Expectation) -> float:
    """Relative, twice the standard error: of a trial, else by texts drawn again and the spread of
    the times."""
    trial = measured.trials.get(tuple(chain))
    if trial is not None:
        return 2 * trial.error
    generator = np.random.default_rng(0)
    spent = found.seconds.sum(1) + found.before
    count = len(found.tokens)
    picks = generator.integers(0, count, (200, count))
    rates = found.tokens[picks].sum(1) / spent[picks].sum(1)
    by_text = float(rates.std() / rates.mean()) if count > 1 else 0.1
    shares = found.seconds.sum(0) / spent.sum()
    tables = [measured.verify[n, False] for n in chain[:-1] or chain]
    tables += [measured.draft[n, False] for n in chain[1:][-1:]]
    by_time = sum((share * own.error) ** 2 for share, own in zip(shares, tables, strict=True))
    return float(2 * (by_text**2 + by_time) ** 0.5)


# ---- what decides --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Insertion:
    """Theorem 3.2 for one model of a chain, and what the renewal model says.

    Attributes:
        new, above, below: names of M_new, M_i and M_{i+1}.
        lengths: L_i, L_{i-new}, L_new. L_new is the tokens that M_i hands up per pass of M_new, so
            that N / L_new in Lemma 3.1 is the number of M_new's passes: as a mean of what M_new
            hands up it would count those that M_i rejects as text.
        seconds: T_i, T_new, T_{i+1} of one pass.
        test: both sides.
        without, with_new: the chains compared.
    """

    new: str
    above: str
    below: str
    lengths: tuple[float, float, float]
    seconds: tuple[float, float, float]
    test: InsertionTest
    without: Candidate
    with_new: Candidate

    @property
    def faster(self) -> bool | None:
        """Whether the chain with the new model was, as both were run in turns; None: it was in some
        of the repeats, or they were not run."""
        pairs = zip(self.without.measured_repeats, self.with_new.measured_repeats, strict=False)
        seen = {after > before for before, after in pairs}
        return seen.pop() if len(seen) == 1 else None


def insertions(measured: Measured, found: Sequence[Candidate]) -> list[Insertion]:
    """For every chain of at least three levels and the model above its last."""
    by_parts = {one.parts: one for one in found}
    tests = []
    for one in found:
        if len(one.parts) < 3:
            continue
        place = len(one.parts) - 2
        kept = (*one.parts[:place], one.parts[-1])
        base = by_parts[kept]
        after = predict(measured, one.parts, one.windows, one.rounds, tail=one.tail)
        before = predict(measured, base.parts, base.windows, base.rounds, tail=base.tail)
        above, new, below = one.parts[place - 1 :]
        window, steps, of_new = one.windows[place], after.steps.sum(0), after.emitted(place)
        lengths = before.emitted(place), of_new, of_new * float(steps[place - 1] / steps[place])
        scale, draft = MeasuredSeconds(measured, one.parts).scale, measured.draft[below, False]
        seconds = (
            _verification(measured, after, place, above) * scale[above],
            measured.verify[new, False].at(window) * scale[new],
            draft.at(window) * scale[below] / window,
        )
        without = (
            _verification(measured, before, place, above) * scale[above],
            # In passes of T_below: a drafter without a model is as fast with many tokens.
            window * draft.at(base.windows[-1]) / draft.at(window),
        )
        test = insertion_test(*seconds, *lengths, float(window), without)
        names = one.levels[place], one.levels[place - 1], one.levels[-1]
        tests.append(Insertion(*names, lengths, seconds, test, base, one))
    return tests


def _verification(measured: Measured, found: Expectation, level: int, part: int) -> float:
    """Seconds of a verification by `level`, as the tables have them for the tokens that it finds
    pending on average."""
    pending = found.verified[level - 1] * found.rounds.sum() / found.steps.sum(0)[level - 1]
    return measured.verify[part, False].at(round(float(pending)))


@dataclass(frozen=True)
class Sensitivity:
    """How far one measured quantity may be off before another chain is predicted to be faster.

    Attributes:
        quantity: in words.
        lower, upper: factors; None: none between .2 and 5 changes it. For acceptances the factor
            is of the rejected share.
        rivals: the chain that is faster then, below and above.
    """

    quantity: str
    lower: float | None
    upper: float | None
    rivals: tuple[str, str]


def sensitivities(
    measured: Measured, parts: Sequence[Part], found: Sequence[Candidate]
) -> list[Sensitivity]:
    """Of the first of `found` against the others, windows as they are."""
    best, others = found[0], list(found[1:4])
    if not others:
        return []
    plain = next(one for one in found if len(one.parts) == 1)
    if plain not in (best, *others):
        others.append(plain)
    used = sorted({n for one in (best, *others) for n in one.parts})
    quantities: dict[int | tuple[int, int], str] = {
        **{n: f"seconds of {parts[n].name}" for n in used},
        OWN: "own seconds per step",
    }
    pairs = list(itertools.pairwise(best.parts))
    for a, b in [*pairs, *([(best.parts[0], best.parts[-1])] if best.tail else [])]:
        quantities[a, b] = f"share of {parts[b].name}'s tokens that {parts[a].name} rejects"
    return [_sensitivity(measured, name, at, best, others) for at, name in quantities.items()]


def _sensitivity(
    measured: Measured,
    name: str,
    at: int | tuple[int, int],
    best: Candidate,
    others: Sequence[Candidate],
) -> Sensitivity:
    """Of the times of a part, or of the rejections of a pair, `at`."""

    def rate(one: Candidate, factor: float) -> float:
        times, rejected = ({at: factor}, None) if isinstance(at, int) else (None, {at: factor})
        return predict(
            measured, one.parts, one.windows, one.rounds, times, rejected, _PLACES, one.tail
        ).whole_tokens_per_second

    offset = {one: one.predicted_tokens_per_second / rate(one, 1.0) for one in (best, *others)}

    def rival(factor: float) -> Candidate | None:
        own = rate(best, factor) * offset[best]
        ahead = {one: rate(one, factor) * offset[one] for one in others}
        first = max(ahead, key=ahead.__getitem__)
        return first if ahead[first] > own else None

    ends: list[tuple[float | None, str]] = []
    for end in (0.2, 5.0):
        there = rival(end)
        if there is None:
            ends.append((None, ""))
            continue
        low, high = 1.0, end
        for _ in range(8):
            middle = (low * high) ** 0.5
            now = rival(middle)
            low, high, there = (middle, high, there) if now is None else (low, middle, now)
        ends.append((high, ", ".join(there.levels)))
    return Sensitivity(name, ends[0][0], ends[1][0], (ends[0][1], ends[1][1]))
