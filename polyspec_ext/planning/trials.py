"""Chains at work with the windows that a search has found for them.

The tables of steps are measured in chains whose windows take turns, and windows are chosen by these
tables: what came out too fast by chance is chosen more often than what came out too slow. The
chains that look best are therefore run for a moment, and their steps are charged with what they
took there: by samples that have chosen nothing, behind the very levels that run before them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..chain import Chain
from ..stats import Stats, merge
from .measure import OWN, Measured, MeasuredSeconds, PartTrial, Trial
from .parts import Part, Request
from .runs import LEAST
from .search import (
    Candidate,
    Work,
    candidate,
    expected_work,
    observed_work,
    predict,
)
from .theory import batches

TRIED = 4  # of the fastest chains, beside plain decoding
_REPEATS = 2  # of every call, if there is time
_WARMING = 0.25  # of a candidate's time, which its untimed call may take
_AT_LEAST = 0.25  # of the time, which trials have whatever was measured before


class Call(NamedTuple):
    """One that was run."""

    seconds: float  # of all of it
    stats: Stats  # of its batch
    rounds: list[tuple[int, float]]  # of the target, tokens and seconds of each


def chain_of(parts: Sequence[Part], one: Candidate, **options: Any) -> Chain:
    """A candidate's `Chain`; `options` are others of it."""
    own = {"rounds": list(one.rounds), "rule": one.rule, "tail": one.tail, **options}
    return Chain([parts[n].thing for n in one.parts], list(one.windows), **own)


@dataclass(frozen=True)
class Runner:
    """Runs candidates side by side."""

    parts: Sequence[Part]  # that candidates are made of
    prompts: Sequence[Sequence[int]]  # token ids
    request: Request  # what is asked of each

    @property
    def calls(self) -> list[list[list[int]]]:
        """The prompts of each call."""
        rows = batches(len(self.prompts), self.request.batch).tolist()
        return [[list(self.prompts[n]) for n in own] for own in rows]

    def run(
        self, some: Sequence[Candidate], repeats: int, limit: float = float("inf")
    ) -> list[list[Call]]:
        """All calls by candidate, of all prompts `repeats` times. The candidates take turns, so
        that a change in the machine's load meets all; when `limit` seconds are over, none begins
        another call, and one that takes longer than a candidate's share of them is cut short."""
        built, calls = [chain_of(self.parts, one) for one in some], self.calls
        each = limit / len(some)
        for one in built:
            self._call(one, calls[0], _WARMING * each, max_new_tokens=16)
        found: list[list[Call]] = [[] for _ in built]
        start = time.perf_counter()
        for turn in range(repeats * len(calls)):
            if turn > 0 and time.perf_counter() - start > limit:
                break
            repeat, number = divmod(turn, len(calls))
            options = self.request.options(turn)
            for place in range(len(built)):
                at = (place + number + repeat) % len(built)
                found[at].append(self._call(built[at], calls[number], each, **options))
        return found

    def _call(
        self, chain: Chain, prompts: Sequence[Sequence[int]], limit: float, **options: Any
    ) -> Call:
        began = time.perf_counter()
        batch = chain.batch(prompts, **{**self.request.options(), **options})
        stats, tokens, seconds = batch.stats, 0, 0.0
        rounds: list[tuple[int, float]] = []
        while len(rounds) < LEAST or time.perf_counter() - began <= limit:
            if not batch.advance():
                break
            rounds.append((stats.num_new_tokens - tokens, stats.decode_seconds - seconds))
            tokens, seconds = stats.num_new_tokens, stats.decode_seconds
        return Call(time.perf_counter() - began, stats, rounds)

    def rates(self, some: Sequence[Candidate], repeats: int) -> list[Candidate]:
        """The candidates with their tokens per second, of whole calls and of decoding: medians of
        `repeats`."""
        found = []
        for one, calls in zip(some, self.run(some, repeats), strict=True):
            whole, decoding = [], []
            size = len(calls) // repeats
            for begin in range(0, len(calls), size):
                own = calls[begin : begin + size]
                stats = _merged(own)
                whole.append(stats.num_new_tokens / sum(call.seconds for call in own))
                decoding.append(stats.tokens_per_second)
            work = observed_work(_merged(calls))
            found.append(
                replace(
                    one,
                    measured_tokens_per_second=statistics.median(whole),
                    measured_decode_tokens_per_second=statistics.median(decoding),
                    measured_repeats=tuple(decoding),
                    measured_length=1 / work.levels[0].steps,
                    measured_work=work,
                )
            )
        return found


def _merged(calls: Sequence[Call]) -> Stats:
    return merge([one.stats for one in calls])


def _error(calls: Sequence[Call]) -> float:
    """Relative standard error of tokens per second, over rounds: that of a ratio of two sums."""
    rounds = np.array([each for one in calls for each in one.rounds])
    tokens, seconds = rounds.sum(0)
    count = len(rounds)
    if count < 2 or not seconds:
        return 0.1
    apart = rounds[:, 0] - tokens / seconds * rounds[:, 1]
    return float((count / (count - 1) * (apart**2).sum()) ** 0.5 / tokens)


def corrected(
    measured: Measured,
    found: Sequence[Candidate],
    runner: Runner,
    limit: float,
    most: int | None = TRIED,
) -> list[Candidate]:
    """The candidates, the fastest first, with predictions that go by trials (`Measured.trials`,
    which are entered here) of the fastest of `found` and of plain decoding.

    Args:
        limit: seconds that all of it may take; trials have a quarter of them at least.
        most: chains that are tried, beside plain decoding; None: all.
    """
    began = time.perf_counter()
    plain = next(one for one in found if not one.windows)
    some = list(dict.fromkeys([*found[:most], plain]))
    while some:
        left = max(limit - measured.spent - (time.perf_counter() - began), _AT_LEAST * limit)
        for one, own in zip(some, runner.run(some, _REPEATS, left), strict=True):
            measured.trials[one.parts] = _trial(measured, one, own)
        now = [
            candidate(measured, runner.parts, c.parts, c.windows, c.rounds, c.tail) for c in found
        ]
        found = sorted(now, key=lambda one: -one.predicted_tokens_per_second)
        # What is recommended should have been run.
        some = [one for one in found[:1] if one.parts not in measured.trials]
    measured.spent += time.perf_counter() - began
    return list(found)


def _trial(measured: Measured, one: Candidate, calls: Sequence[Call]) -> Trial:
    """Of a candidate that was run, beside what the tables say of the very calls."""
    tables = replace(measured, trials={})
    rows = [number % len(measured.calls) for number in range(len(calls))]
    expected = predict(tables, one.parts, one.windows, one.rounds, tail=one.tail).of_batches(rows)
    times = MeasuredSeconds(tables, one.parts)
    prefills = dict(zip(one.parts, times.prefills()[rows].sum(0).tolist(), strict=True))
    work = expected_work(expected, times)
    return ran(one.parts, _merged(calls), work, prefills, _error(calls))


def ran(
    chain: Sequence[int],
    stats: Stats,
    expected: Work,
    prefills: Mapping[int, float],
    error: float = 0.0,
) -> Trial:
    """What a chain took over what was expected.

    Args:
        stats: of all requests.
        expected: of as many.
        prefills: by part, seconds that were expected.
    """
    found = observed_work(stats)
    tokens = stats.num_new_tokens
    each = {
        part: PartTrial(
            theirs.seconds / theirs.steps * mine.steps,
            mine.seconds,
            round(theirs.steps * tokens),
            theirs.steps / mine.steps,
        )
        for part, mine, theirs in zip(chain, expected.levels, found.levels, strict=True)
        if mine.steps > 0 and theirs.steps > 0
    }
    steps = [sum(level.steps for level in work.levels) for work in (expected, found)]
    own = found.own / steps[1] * steps[0]
    each[OWN] = PartTrial(own, expected.own, round(steps[1] * tokens))
    read = {
        part: PartTrial(level.prefill_seconds, prefills[part], stats.num_requests)
        for part, level in zip(chain, stats.levels, strict=True)
    }
    return Trial(each, read, error)


def at_the_speed_of(measured: Measured, runs: Mapping[Candidate, Stats]) -> dict[Candidate, float]:
    """Tokens per second of whole calls, predicted for the speed that the machine had while these
    chains were run side by side, which may be long after the measurement: the times of every
    chain's steps and prefills, by part, in the ratio of what the other chains' took in these runs
    to what was predicted of them. Nothing of the chain's own run is in it.

    Args:
        runs: statistics of each candidate's requests, of all measured texts alike.
    """
    seen = {}
    for one, stats in runs.items():
        times = MeasuredSeconds(measured, one.parts)
        share = stats.num_requests / (len(measured.calls) * measured.batch)
        prefills = times.prefills().sum(0) * share
        expected = dict(zip(one.parts, prefills.tolist(), strict=True))
        seen[one.parts] = ran(one.parts, stats, one.work, expected)
    found = {}
    for one in runs:
        others = {chain: trial for chain, trial in seen.items() if chain != one.parts}
        now = replace(measured, trials=others)
        factors = {n: now.correction(one.parts, n) for n in (*one.parts, OWN)}
        # Prefills have corrections of their own in place of the steps' factors.
        prefill = {
            n: measured.prefill[n].times(now.prefill_correction(n) / factors[n]) for n in one.parts
        }
        before, after = (
            predict(tables, one.parts, one.windows, one.rounds, by, tail=one.tail)
            for tables, by in ((measured, None), (replace(measured, prefill=prefill), factors))
        )
        # (What the block rule gains is in the prediction, and in none of these.)
        gain = after.whole_tokens_per_second / before.whole_tokens_per_second
        found[one] = one.predicted_tokens_per_second * gain
    return found
