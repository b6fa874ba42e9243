"""What is computed from the lines of a run: ratios of rates with bootstrap intervals, pooled
acceptance lengths, and how sure the losslessness is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyspec_ext.bench.differences import largest_tie

from ..record import Turn

Key = tuple[Any, int, int]  # question, turn, repeat
Turns = Mapping[Key, Turn]  # of one method, those that did not fail

SAMPLES, SEED, CONFIDENCE = 2000, 0, 0.95


class Interval(NamedTuple):
    """A number with its bootstrap interval over questions; one question leaves no interval."""

    value: float
    low: float | None
    high: float | None
    questions: int
    turns: int


def same_turns(ours: Turns, theirs: Turns) -> list[Key]:
    """Of two methods, the turns that neither failed: those that are compared."""
    return [key for key in ours if key in theirs]


def wall_seconds(turn: Turn) -> float | None:
    """Of the whole call."""
    return turn.seconds


def decode_seconds(turn: Turn) -> float | None:
    """Behind the prefill; None where the method does not tell."""
    if turn.seconds is None or turn.prefill_seconds is None:
        return None
    return turn.seconds - turn.prefill_seconds


Seconds = Callable[[Turn], float | None]


def rate(turns: Turns, seconds: Seconds = wall_seconds) -> float | None:
    """New tokens per second, over the turns that tell their seconds, per repeat, then the
    median."""
    sums: dict[int, list[float]] = {}
    for turn in turns.values():
        spent = seconds(turn)
        if spent is not None:
            entry = sums.setdefault(turn.repeat, [0.0, 0.0])
            entry[0] += turn.new_tokens or 0
            entry[1] += spent
    rates = [tokens / spent for tokens, spent in sums.values() if spent > 0]
    return statistics.median(rates) if rates else None


def speedup(
    ours: Turns,
    theirs: Turns,
    keys: Sequence[Key] | None = None,
    seconds: Seconds = wall_seconds,
) -> Interval | None:
    """Tokens per second of one method over those of another, over the same turns: the median over
    the repeats of (sum of tokens / sum of seconds) over (sum of tokens / sum of seconds). The
    interval is that of a bootstrap over questions, with all their turns and repeats.

    Args:
        ours, theirs: the turns of both that did not fail.
        keys: of `same_turns`; None: all of them.

    Returns:
        None where no turn is in both.
    """
    parts: dict[Any, dict[int, list[float]]] = {}
    repeats: dict[int, None] = {}
    count = 0
    for key in same_turns(ours, theirs) if keys is None else keys:
        spent = seconds(ours[key]), seconds(theirs[key])
        if spent[0] is None or spent[1] is None:
            continue
        question, _, repeat = key
        repeats[repeat] = None
        entry = parts.setdefault(question, {}).setdefault(repeat, [0.0] * 4)
        numbers = (ours[key].new_tokens or 0, spent[0], theirs[key].new_tokens or 0, spent[1])
        entry[:] = [had + new for had, new in zip(entry, numbers, strict=True)]
        count += 1
    if not count:
        return None
    sums = np.zeros((len(parts), len(repeats), 4))
    for row, own in enumerate(parts.values()):
        for column, repeat in enumerate(repeats):
            sums[row, column] = own.get(repeat, 0.0)
    found = _median_ratios(sums.sum(0)[None])
    if not found.size:
        return None
    drawn = _median_ratios(np.einsum("bq,qrk->brk", _resampled(len(parts)), sums))
    return Interval(float(found[0]), *_bounds(drawn, len(parts)), len(parts), count)


def _median_ratios(sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``[B]`` of ``[B, R, 4]``; repeats without turns are left out, and samples without
    repeats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    each = each[~np.isnan(each).all(1)]
    found: np.ndarray[Any, Any] = np.nanmedian(each, axis=1)
    return found


def pooled_length(turns: Turns, keys: Sequence[Key]) -> Interval | None:
    """Tokens per verification of the target, its correction or bonus included, pooled over all its
    verifications. None where nothing was verified."""
    sums: dict[Any, list[float]] = {}
    count = 0
    for key in keys:
        levels = turns[key].levels
        if levels and levels[0].accepted:
            entry = sums.setdefault(key[0], [0.0, 0.0])
            entry[0] += sum(levels[0].accepted)
            entry[1] += len(levels[0].accepted)
            count += 1
    if not sums:
        return None
    both = np.array(list(sums.values()))
    drawn = _resampled(len(both)) @ both
    total = both.sum(0)
    bounds = _bounds(drawn[:, 0] / drawn[:, 1], len(both))
    return Interval(float(total[0] / total[1]), *bounds, len(both), count)


def length_variances(turns: Turns) -> dict[Any, float]:
    """By question, the variance of the target's acceptance length over all verifications of its
    turns (Figure 4)."""
    found: dict[Any, list[int]] = {}
    for turn in turns.values():
        if turn.levels:
            found.setdefault(turn.question_id, []).extend(turn.levels[0].accepted)
    return {name: statistics.pvariance(values) for name, values in found.items() if values}


def _resampled(questions: int) -> np.ndarray[Any, Any]:
    """``[SAMPLES, questions]``, how often each question was drawn; the same for the same number."""
    random = np.random.default_rng(SEED)
    return random.multinomial(questions, np.full(questions, 1 / questions), size=SAMPLES).astype(
        np.float64
    )


def _bounds(samples: np.ndarray[Any, Any], questions: int) -> tuple[float | None, float | None]:
    if questions < 2:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


class Greedy(NamedTuple):
    """Texts beside the baseline's of the same prompts.

    Attributes:
        identical: as many are the same.
        tied: part where the target's two largest logits are a tie (`differences.TIES`).
        other: part elsewhere.
        gap: the largest gap at a first difference.
        unknown: have nothing to be compared with.
    """

    identical: int
    tied: int
    other: int
    gap: float | None
    unknown: int


def greedy_texts(turns: Turns, dtype: str) -> Greedy:
    """Counts turns.

    Args:
        dtype: of the target, for what is a tie.
    """
    tie = largest_tie(dtype)
    identical = tied = other = unknown = 0
    gaps = []
    for turn in turns.values():
        found = turn.lossless
        if found is None or "identical" not in found:
            unknown += 1
        elif found["identical"]:
            identical += 1
        else:
            gap = found["gap"]
            if gap is not None:
                gaps.append(gap)
            if gap is not None and gap <= tie:
                tied += 1
            else:
                other += 1
    return Greedy(identical, tied, other, max(gaps, default=None), unknown)


class Sampled(NamedTuple):
    """How far the likelihood of the texts is from its mean under the target.

    Attributes:
        z: in standard deviations of chance.
        p_value: of as large a deviation, in either direction.
        texts: that were looked at.
    """

    z: float
    p_value: float
    texts: int


def sampled_texts(turns: Turns) -> Sampled | None:
    """Of all texts: every repeat has seeds of its own. None where no text was looked at."""
    told = [turn.lossless for turn in turns.values() if turn.lossless is not None]
    found = [one for one in told if "surprise" in one]
    variance = sum(one["variance"] for one in found)
    if not variance > 0:
        return None
    z = sum(one["surprise"] for one in found) / math.sqrt(variance)
    return Sampled(z, math.erfc(abs(z) / math.sqrt(2)), len(found))
