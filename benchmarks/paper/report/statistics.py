"""What is computed from the lines of a run: ratios of rates with bootstrap intervals, pooled
acceptance lengths, how sure the losslessness is, and sums of what the levels did."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.differences import largest_tie

from ..record import Turn

Key = tuple[Any, int, int]  # question, turn, repeat
Turns = Mapping[Key, Turn]  # of one method, those that did not fail
Floats = npt.NDArray[np.float64]

SAMPLES, SEED, CONFIDENCE = 2000, 0, 0.95


class Interval(NamedTuple):
    """A number with its bootstrap interval over questions; one question leaves no interval."""

    value: float
    low: float | None
    high: float | None


def same_turns(ours: Turns, theirs: Turns) -> list[Key]:
    """Of two methods, the turns that neither failed: those that are compared."""
    return [key for key in ours if key in theirs]


def rate(turns: Turns, *, decode: bool = False) -> float | None:
    """New tokens per second of the calls or, of `decode`, behind the prefill: over the turns that
    tell their seconds, per repeat, then the median."""
    sums: dict[int, list[float]] = {}
    for turn in turns.values():
        spent = turn.decode_seconds if decode else turn.seconds
        if spent is not None:
            entry = sums.setdefault(turn.repeat, [0.0, 0.0])
            entry[0] += turn.new_tokens or 0
            entry[1] += spent
    rates = [tokens / spent for tokens, spent in sums.values() if spent > 0]
    return statistics.median(rates) if rates else None


def speedup(ours: Turns, theirs: Turns, *, decode: bool = False) -> Interval | None:
    """Tokens per second of one method over those of another, over the same turns: the median over
    the repeats of (sum of tokens / sum of seconds) over (sum of tokens / sum of seconds). None
    where no turn is in both."""
    rows = []
    for key in same_turns(ours, theirs):
        one, other = ours[key], theirs[key]
        spent = [turn.decode_seconds if decode else turn.seconds for turn in (one, other)]
        if None not in spent:
            numbers = (one.new_tokens, spent[0], other.new_tokens, spent[1])
            rows.append((key, [float(number or 0) for number in numbers]))
    return _interval(rows, _median_ratios)


def _median_ratios(sums: Floats) -> Floats:
    """``[B]`` of ``[B, R, 4]``; repeats without turns are left out, and samples without
    repeats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    found: Floats = np.nanmedian(each[~np.isnan(each).all(1)], axis=1)
    return found


def pooled_length(turns: Turns, keys: Iterable[Key]) -> Interval | None:
    """Tokens per verification of the target, its correction or bonus included, pooled over all its
    verifications. None where nothing was verified."""
    rows = []
    for key in keys:
        levels = turns[key].levels
        if levels and levels[0].accepted:
            rows.append((key, (sum(levels[0].accepted), len(levels[0].accepted))))

    def pooled(sums: Floats) -> Floats:
        found: Floats = sums[..., 0].sum(1) / sums[..., 1].sum(1)
        return found

    return _interval(rows, pooled)


def _interval(
    rows: Sequence[tuple[Key, Sequence[float]]], statistic: Callable[[Floats], Floats]
) -> Interval | None:
    """A statistic of sums over turns, with the interval of a bootstrap over questions: each is
    drawn with all its turns and repeats.

    Args:
        rows: of each turn, the numbers to sum.
        statistic: from the sums ``[B, repeats, numbers]`` of samples to at most ``[B]``.
    """
    if not rows:
        return None
    questions = {name: at for at, name in enumerate(dict.fromkeys(key[0] for key, _ in rows))}
    repeats = {name: at for at, name in enumerate(dict.fromkeys(key[2] for key, _ in rows))}
    sums = np.zeros((len(questions), len(repeats), len(rows[0][1])))
    for (question, _, repeat), numbers in rows:
        sums[questions[question], repeats[repeat]] += numbers
    values = statistic(sums.sum(0)[None])
    if not values.size:
        return None
    count = len(questions)
    if count < 2:
        return Interval(float(values[0]), None, None)
    # How often each question is drawn; the same for the same number of questions.
    random = np.random.default_rng(SEED)
    drawn = random.multinomial(count, np.full(count, 1 / count), size=SAMPLES).astype(np.float64)
    samples = statistic(np.einsum("bq,qrk->brk", drawn, sums))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return Interval(float(values[0]), float(low), float(high))


def length_variances(turns: Turns) -> dict[Any, float]:
    """By question, the variance of the target's acceptance length over all verifications of its
    turns (Figure 4)."""
    found: dict[Any, list[int]] = {}
    for turn in turns.values():
        if turn.levels:
            found.setdefault(turn.question_id, []).extend(turn.levels[0].accepted)
    return {name: statistics.pvariance(values) for name, values in found.items() if values}


def greedy_texts(turns: Turns, dtype: str) -> dict[str, Any]:
    """Counts texts beside the baseline's of the same prompts.

    Args:
        dtype: of the target, for what is a tie.

    Returns:
        "identical": as many are the same; "tied": part where the target's two largest logits are a
        tie (`differences.TIES`); "other": part elsewhere; "gap": the largest at a first difference,
        or None; "unknown": have nothing to be compared with.
    """
    compared = [turn.lossless for turn in turns.values() if turn.lossless]
    parted = [one["gap"] for one in compared if not one["identical"]]
    gaps = [gap for gap in parted if gap is not None]
    tied = sum(gap <= largest_tie(dtype) for gap in gaps)
    return {
        "identical": len(compared) - len(parted),
        "tied": tied,
        "other": len(parted) - tied,
        "gap": max(gaps, default=None),
        "unknown": len(turns) - len(compared),
    }


def sampled_texts(turns: Turns) -> dict[str, Any]:
    """How far the likelihood of the texts is from its mean under the target. (Every repeat has
    seeds of its own.)

    Returns:
        "z": in standard deviations of chance; "p_value": of as large a deviation, in either
        direction; "texts": that were looked at. Empty where none was.
    """
    found = [turn.lossless for turn in turns.values() if turn.lossless]
    variance = sum(one["variance"] for one in found)
    if not variance > 0:
        return {}
    z = sum(one["surprise"] for one in found) / math.sqrt(variance)
    return {"z": z, "p_value": math.erfc(abs(z) / math.sqrt(2)), "texts": len(found)}


@dataclass
class Sums:
    """Of a level, over turns; `accepted` tokens by `verified` verifications."""

    name: str
    passes: int = 0
    seconds: float = 0.0
    verified: int = 0
    accepted: int = 0

    @property
    def length(self) -> float | None:
        """L."""
        return over(self.accepted, self.verified)

    @property
    def pass_seconds(self) -> float | None:
        """T."""
        return over(self.seconds, self.passes)


def sums(turns: Turns) -> tuple[int, float | None, list[Sums]]:
    """New tokens, decode seconds (None where they are not told), and the sums by level."""
    found: list[Sums] = []
    spent = [turn.decode_seconds for turn in turns.values()]
    decode = None if not spent or None in spent else sum(seconds or 0.0 for seconds in spent)
    for turn in turns.values():
        for place, level in enumerate(turn.levels):
            if place == len(found):
                found.append(Sums(level.name))
            entry = found[place]
            entry.passes += level.passes
            entry.seconds += level.seconds
            entry.verified += len(level.accepted)
            entry.accepted += sum(level.accepted)
    return sum(turn.new_tokens or 0 for turn in turns.values()), decode, found


def over(a: float | None, b: float | None) -> float | None:
    """The ratio; None where it has none."""
    return a / b if a is not None and b else None
