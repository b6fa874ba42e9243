"""Search over chains: the best windows of each, its predicted speed, and trials of the fastest."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .measure import (
    MOST,
    MOST_ABOVE,
    Call,
    Measured,
    MeasuredSeconds,
    Part,
    Runner,
    Setting,
    Trial,
    merged,
    owners_above,
    steps_of,
)
from .theory import (
    Acceptance,
    Expectation,
    InsertionTest,
    Proposals,
    expectation,
    insertion_test,
    starts,
)

LONGEST = 4  # levels of a chain: there are many longer chains, and few would be tried
TRIED = 4  # number of the fastest chains with a trial, beside plain decoding
_POSITIONS = 400  # positions of texts for the choice of windows
_SETTINGS = 200  # maximum predictions per chain
_EXTRA = (0, 1, None)  # rounds beyond the number that fills a window; None: unbounded
_REPEATS = 2  # of every call of a trial, if there is time
_TRIALS = 0.25  # least share of the time for trials


@dataclass(frozen=True)
class Candidate:
    """A chain with its prediction and measurements.

    Attributes:
        parts: indices of its elements, target first.
        levels: names of its elements.
        windows, rounds, rule, tail: as for `Chain`.
        predicted_tokens_per_second: of whole calls, prefills included.
        predicted_decode_tokens_per_second: of decoding alone, as `Stats.tokens_per_second`.
        uncertainty: relative; twice the standard error: of the chain's trial over its rounds, else
            from the spread of the texts.
        length: tokens per round of the target.
        measured_tokens_per_second, measured_decode_tokens_per_second: medians of the repeats;
            measured_length: mean. None: not run.
        measured_repeats: measured decoding tokens per second of each repeat.
    """

    parts: tuple[int, ...]
    levels: tuple[str, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    predicted_tokens_per_second: float
    predicted_decode_tokens_per_second: float
    uncertainty: float
    length: float
    rule: str = "token"
    tail: int = 0
    measured_tokens_per_second: float | None = None
    measured_decode_tokens_per_second: float | None = None
    measured_repeats: tuple[float, ...] = ()
    measured_length: float | None = None

    @property
    def setting(self) -> Setting:
        """The arguments of `Chain`."""
        return Setting(self.parts, self.windows, self.rounds, self.tail, self.rule)

    @property
    def error(self) -> float | None:
        """Predicted over measured tokens per second, less 1; None: not run."""
        if self.measured_tokens_per_second is None:
            return None
        return self.predicted_tokens_per_second / self.measured_tokens_per_second - 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        del values["parts"]
        return {**values, "tokens_per_round": values.pop("length")}


def chains(parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    """Yield every chain of at most `LONGEST` elements, in order: the target, any other models, and
    at most a single drafter."""
    models = [n for n, part in enumerate(parts) if part.model and n > 0]
    drafters = [n for n, part in enumerate(parts) if not part.model and n > 0]
    for count in range(min(len(models), LONGEST - 1) + 1):
        for some in itertools.combinations(models, count):
            chain = (0, *some)
            if not owners_above([parts[n] for n in chain]):
                continue
            yield chain
            for last in drafters if count < LONGEST - 1 else ():
                if parts[last].drafts_below(parts[chain[-1]], parts[0]):
                    yield (*chain, last)


def candidates(measured: Measured, parts: Sequence[Part]) -> list[Candidate]:
    """Return each chain with its best windows, the fastest first."""
    return fastest_first(
        candidate(measured, parts, best_setting(measured, chain, tails=not parts[chain[-1]].trees))
        for chain in chains(parts)
    )


def fastest_first(some: Any) -> list[Candidate]:
    """Return the candidates in falling order of predicted tokens per second."""
    return sorted(some, key=lambda each: -each.predicted_tokens_per_second)


def candidate(measured: Measured, parts: Sequence[Part], setting: Setting) -> Candidate:
    """Return the prediction for a chain."""
    expected = predict(measured, setting)
    return Candidate(
        setting.parts,
        tuple(parts[n].name for n in setting.parts),
        setting.windows,
        setting.rounds,
        expected.whole_tokens_per_second,
        expected.tokens_per_second,
        _uncertainty(measured, setting.parts, expected),
        expected.length,
        tail=setting.tail,
    )


def predict(measured: Measured, setting: Setting, positions: int | None = None) -> Expectation:
    """Return the renewal model's expectation of a chain on the measured texts; if they have more
    than `positions`, on their first whole batches, with at least half of `positions`."""
    chain = setting.parts
    acceptance = measured.acceptance(chain, *setting.windows[-1:])
    if positions is not None:
        acceptance = _first(acceptance, positions, measured.batch)
    seconds, factor = MeasuredSeconds(measured, chain), measured.factor(chain)
    expected = expectation(
        setting.windows, setting.rounds, acceptance, seconds, measured.batch, setting.tail
    )
    before = measured.before(chain)[: len(expected.tokens)]
    return replace(expected, seconds=expected.seconds * factor, before=before * factor)


def _first(acceptance: Acceptance, positions: int, batch: int) -> Acceptance:
    remaining = acceptance.remaining
    assert remaining is not None
    begins = starts(remaining)
    texts = -(-int(np.searchsorted(begins, positions // 2)) // batch) * batch
    if len(remaining) <= positions or texts >= len(begins):
        return acceptance
    cut = int(begins[texts])

    def first(values: Any) -> Any:
        if isinstance(values, Proposals):
            return Proposals(*map(first, values))
        return None if values is None else values[:cut]

    others = (remaining, acceptance.proposals, acceptance.tail, acceptance.room)
    return Acceptance(tuple(map(first, acceptance.levels)), *map(first, others))


def best_setting(measured: Measured, chain: tuple[int, ...], *, tails: bool = True) -> Setting:
    """Return the setting with the most tokens per second.

    With two levels all windows are tried; with more, coordinate descent changes a number at a time
    until no change helps.

    Args:
        tails: whether the chain may have a tail; not with a drafter of trees.
    """
    count = len(chain) - 1
    if count == 0:
        return Setting(chain)
    known: dict[Setting, float] = {}

    def rate(sizes: Sequence[int], extra: Sequence[int | None]) -> float:
        *windows, tail = sizes
        rounds = _rounds(windows, extra)
        setting = Setting(chain, tuple(windows), rounds, min(tail, windows[-1]))
        if setting not in known:
            expected = predict(measured, setting, _POSITIONS)
            known[setting] = expected.tokens_per_second
        return known[setting]

    if count == 1:
        for window in range(1, MOST + 1):
            rate((window, 0), ())
        return max(known, key=known.__getitem__)
    sizes = (*(min(3 * 2**i, MOST) for i in reversed(range(count))), 0)  # windows, and the tail
    extra: tuple[int | None, ...] = (1,) * (count - 1)
    best, moved = rate(sizes, extra), True
    while moved and len(known) < _SETTINGS:
        moved = False
        for at, step in itertools.product(range(count + tails), (1, -1, 3, -3)):
            size = sizes[at] + step
            largest = (*[MOST_ABOVE] * (count - 1), MOST, sizes[count - 1])[at]
            if not (1 if at < count else 0) <= size <= largest:
                continue
            other = (*sizes[:at], size, *sizes[at + 1 :])
            if rate(other, extra) > best:
                sizes, best, moved = other, rate(other, extra), True
        for at, more in itertools.product(range(count - 1), _EXTRA):
            bounds = (*extra[:at], more, *extra[at + 1 :])
            if rate(sizes, bounds) > best:
                extra, best, moved = bounds, rate(sizes, bounds), True
    return max(known, key=known.__getitem__)


def _rounds(windows: Sequence[int], extra: Sequence[int | None]) -> tuple[int, ...]:
    pairs = itertools.pairwise(windows)
    return tuple(
        0 if more is None else -(-window // (below + 1)) + more
        for (window, below), more in zip(pairs, extra, strict=True)
    )


def _uncertainty(measured: Measured, chain: Sequence[int], expected: Expectation) -> float:
    trial = measured.trials.get(tuple(chain))
    if trial is not None:
        return 2 * trial.error
    spent = expected.seconds.sum(1) + expected.before
    count = len(spent)
    if count < 2:
        return 0.2
    apart = expected.tokens - expected.whole_tokens_per_second * spent
    return 2 * float((count / (count - 1) * (apart**2).sum()) ** 0.5 / expected.tokens.sum())


# ---- trials --------------------------------------------------------------------------------------


def with_rates(some: Sequence[Candidate], runner: Runner, repeats: int) -> list[Candidate]:
    """Run all calls `repeats` times with each candidate, and return candidates with the rates."""
    ran, size = [], len(runner.groups)
    for one, calls in zip(some, runner.run([c.setting for c in some], repeats), strict=True):
        whole, decoding = [], []
        for turn in range(repeats):
            each = calls[turn * size : (turn + 1) * size]
            stats = merged(each)
            whole.append(stats.num_new_tokens / sum(call.seconds for call in each))
            decoding.append(stats.tokens_per_second)
        stats = merged(calls)
        ran.append(
            replace(
                one,
                measured_tokens_per_second=statistics.median(whole),
                measured_decode_tokens_per_second=statistics.median(decoding),
                measured_repeats=tuple(decoding),
                measured_length=stats.num_new_tokens / stats.levels[0].num_verifications,
            )
        )
    return ran


def with_trials(
    measured: Measured,
    some: Sequence[Candidate],
    runner: Runner,
    limit: float,
    most: int | None = TRIED,
) -> list[Candidate]:
    """Run the fastest candidates and plain decoding for a moment, enter `Measured.trials`, and
    return all candidates with corrected predictions.

    Windows are chosen by measured times, so chains with times too short by chance are chosen more
    often than chains with times too long: without trials, predictions are biased.

    Args:
        limit: seconds for all measurements; trials have at least a quarter of them.
        most: number of chains with a trial, beside plain decoding; None: all.
    """
    began = time.perf_counter()
    plain = next(one for one in some if not one.windows)
    tried = list(dict.fromkeys([*some[:most], plain]))
    untried = replace(measured, trials={})
    while tried:
        left = max(limit - measured.spent - (time.perf_counter() - began), _TRIALS * limit)
        calls = runner.run([one.setting for one in tried], _REPEATS, left)
        for one, each in zip(tried, calls, strict=True):
            measured.trials[one.parts] = _trial(untried, one.setting, each)
        some = fastest_first(candidate(measured, runner.parts, one.setting) for one in some)
        # The recommended chain needs a trial.
        tried = [one for one in some[:1] if one.parts not in measured.trials]
    measured.spent += time.perf_counter() - began
    return list(some)


def _trial(untried: Measured, setting: Setting, calls: Sequence[Call]) -> Trial:
    """Return the measured seconds of calls over the seconds predicted for as many steps of each
    level; for as many tokens if acceptances come from rounds, which the calls measure better."""
    stats, expected = merged(calls), predict(untried, setting)
    count = len(expected.tokens)
    expected = expected.of_batches([n % count for n in range(len(calls))])
    done = steps_of(stats, untried.batch) / np.maximum(expected.batch_steps.sum(0), 1e-9)
    if not untried.observed.keys().isdisjoint(itertools.pairwise(setting.parts)):
        done[:] = stats.num_new_tokens / expected.tokens.sum()
    predicted = float(expected.seconds.sum(0) @ done + np.sum(expected.before))
    # The relative standard error of tokens per second: of a ratio of two sums, over rounds.
    rounds = np.array([each for call in calls for each in call.rounds])
    (tokens, seconds), rows = rounds.sum(0), len(rounds)
    apart = rounds[:, 0] - tokens / seconds * rounds[:, 1]
    error = float((rows / max(rows - 1, 1) * (apart**2).sum()) ** 0.5 / tokens)
    return Trial(sum(call.seconds for call in calls) / predicted, error, rows)


# ---- Theorem 3.2 ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Insertion:
    """Theorem 3.2 for a model of a chain, and the renewal model's predictions.

    Attributes:
        new, above, below: names of M_new, M_i and M_{i+1}.
        lengths: L_i, L_{i-new}, L_new. L_new is the tokens that M_i hands up per pass of M_new, so
            that N / L_new in Lemma 3.1 is the number of M_new's passes.
        seconds: T_i, T_new, T_{i+1}, seconds per pass.
        test: both sides of the theorem.
        without, with_new: the compared chains.
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
        """Whether the chain with the new model was faster in every repeat (False: in none); None:
        in some repeats, or the chains were not run."""
        pairs = zip(self.without.measured_repeats, self.with_new.measured_repeats, strict=False)
        seen = {after > before for before, after in pairs}
        return seen.pop() if len(seen) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {
            **{name: getattr(self, name) for name in ("new", "above", "below")},
            "lengths": dict(zip(("L_i", "L_i_new", "L_new"), self.lengths, strict=True)),
            "seconds": dict(zip(("T_i", "T_new", "T_below"), self.seconds, strict=True)),
            **self.test._asdict(),
            "holds_as_printed": self.test.printed,
            "holds_exactly": self.test.exact,
            "faster_measured": self.faster,
            "without": self.without.to_dict(),
            "with": self.with_new.to_dict(),
        }


def insertions(measured: Measured, some: Sequence[Candidate]) -> list[Insertion]:
    """Return the theorem for every chain of at least three levels, with the model above the last
    level as M_new; chains with a drafter of trees are left out."""
    by_parts = {one.parts: one for one in some}
    tests = []
    for one in some:
        if len(one.parts) < 3 or one.parts[-2:] in measured.trees:
            continue
        at = len(one.parts) - 2
        base = by_parts[one.parts[:at] + one.parts[-1:]]
        before, after = (predict(measured, c.setting) for c in (base, one))
        above, new, below = one.parts[at - 1 :]
        window, steps, of_new = one.windows[at], after.steps.sum(0), after.emitted(at)
        lengths = before.emitted(at), of_new, of_new * float(steps[at - 1] / steps[at])
        factor, draft = measured.factor(one.parts), measured.draft[below]
        seconds = (
            _verification(measured, after, at, above) * factor,
            measured.verify[new, 0].at(window) * factor,
            draft.at(window) * factor / window,
        )
        without = (
            _verification(measured, before, at, above) * measured.factor(base.parts),
            # In passes of T_below: a drafter without a model is as fast with many tokens as with 1.
            window * draft.at(base.windows[-1]) / draft.at(window),
        )
        test = insertion_test(*seconds, *lengths, float(window), without)
        names = one.levels[at], one.levels[at - 1], one.levels[-1]
        tests.append(Insertion(*names, lengths, seconds, test, base, one))
    return tests


def _verification(measured: Measured, expected: Expectation, level: int, part: int) -> float:
    pending = expected.verified[level - 1] * expected.rounds.sum()
    pending /= expected.steps.sum(0)[level - 1]
    return measured.verify[part, 0].at(round(float(pending)))
