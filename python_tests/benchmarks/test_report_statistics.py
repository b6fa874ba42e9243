"""The report's intervals, against enumeration of the bootstrap."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.record import LevelTurn, Turn
from benchmarks.paper.report import statistics as own


def turn(
    question: int, tokens: int, seconds: float, accepted: list[int] | None = None, repeat: int = 0,
    **more: Any,
) -> Turn:  # fmt: skip
    levels = [] if accepted is None else [LevelTurn("target", len(accepted), seconds, accepted)]
    return Turn(
        question, "writing", "mt_bench", 0, "a method", repeat, "ok", new_tokens=tokens,
        seconds=seconds, levels=levels, **more,
    )  # fmt: skip


def turns(*given: Turn) -> own.Turns:
    return {(one.question_id, one.turn, one.repeat): one for one in given}


def test_interval_is_the_bootstraps() -> None:
    ours = turns(turn(1, 10, 1.0), turn(2, 30, 2.0), turn(3, 20, 4.0))
    theirs = turns(turn(1, 12, 3.0), turn(2, 20, 4.0), turn(3, 24, 5.0))
    samples = []
    for drawn in itertools.product((1, 2, 3), repeat=3):
        rates = [
            sum(x[q, 0, 0].new_tokens or 0 for q in drawn)
            / sum(x[q, 0, 0].seconds or 0 for q in drawn)
            for x in (ours, theirs)
        ]
        samples.append(rates[0] / rates[1])
    found = own.speedup(ours, theirs)
    assert found is not None
    assert found.value == pytest.approx((60 / 7) / (56 / 12))
    # One question drawn three times has 1/27, more than a tail: the bounds are the extremes.
    assert (found.low, found.high) == pytest.approx((min(samples), max(samples)))


def test_interval_covers_the_true_ratio() -> None:
    """Of 200 runs with a true ratio of 2, all but a tenth have it in their interval."""
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        noise = draw.gamma(20, 1 / 20, size=(2, 30))
        ours = turns(*(turn(q, 40, 0.5 * float(noise[0, q])) for q in range(30)))
        theirs = turns(*(turn(q, 40, float(noise[1, q])) for q in range(30)))
        found = own.speedup(ours, theirs)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 2 <= found.high
    assert 176 <= covered < 200  # 0.95 of 200 less, or more, 4.5 deviations


def test_questions_alike_leave_no_doubt() -> None:
    ours = turns(*(turn(q, 10, 1.0, [2, 3]) for q in range(4)))
    theirs = turns(*(turn(q, 10, 2.0) for q in range(4)))
    assert own.speedup(ours, theirs) == own.Interval(2.0, 2.0, 2.0)
    assert own.pooled_length(ours, list(ours)) == own.Interval(2.5, 2.5, 2.5)


def test_the_median_is_over_repeats_not_over_questions() -> None:
    speeds = (1.0, 5.0, 2.0)
    ours = turns(*(turn(1, 10, 1 / s, repeat=r) for r, s in enumerate(speeds)))
    theirs = turns(*(turn(1, 10, 1.0, repeat=r) for r in range(3)))
    found = own.speedup(ours, theirs)
    assert found is not None
    assert found.value == pytest.approx(2.0)


def test_turns_are_bootstrapped_with_their_question() -> None:
    """Two turns of one question are no two observations."""
    one = {(1, t, 0): turn(1, 10, 1.0 + t) for t in range(2)}
    base = {(1, t, 0): turn(1, 10, 2.0) for t in range(2)}
    assert own.speedup(one, base) == own.Interval(pytest.approx(4 / 3), None, None)


def test_nothing_in_common() -> None:
    assert own.speedup(turns(turn(1, 5, 1.0)), turns(turn(2, 5, 1.0))) is None
    assert own.pooled_length(turns(turn(1, 5, 1.0)), [(1, 0, 0)]) is None
    assert own.rate({}) is None
    assert own.sampled_texts(turns(turn(1, 5, 1.0))) == {}


def test_no_prefill_no_decode_speed() -> None:
    told, untold = turn(1, 10, 3.0, prefill_seconds=1.0), turn(1, 10, 3.0)
    assert own.rate(turns(told), decode=True) == pytest.approx(5.0)
    assert own.rate(turns(untold), decode=True) is None
    assert own.speedup(turns(told), turns(untold), decode=True) is None


def test_lengths_are_pooled_over_verifications() -> None:
    both = turns(turn(1, 9, 1.0, [9]), turn(2, 9, 1.0, [1, 1, 1, 2, 4]))
    found = own.pooled_length(both, list(both))
    assert found is not None
    assert found.value == pytest.approx(18 / 6)
    assert (found.low, found.high) == pytest.approx((9 / 5, 9.0))
    assert own.length_variances(both) == {1: 0.0, 2: statistics.pvariance([1, 1, 1, 2, 4])}


def test_p_value_of_a_deviation() -> None:
    off = {"surprise": 2.0, "variance": 1.0}
    both = turns(*(turn(q, 5, 1.0, lossless=off, repeat=r) for q in range(2) for r in range(2)))
    found = own.sampled_texts(both)
    assert found["texts"] == 4
    assert found["z"] == pytest.approx(4.0)
    assert found["p_value"] == pytest.approx(math.erfc(4 / math.sqrt(2)))
    assert found["p_value"] == pytest.approx(6.33e-5, rel=1e-2)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", (1, 1, 3)), ("bfloat16", (1, 3, 1)), ("float16", (1, 2, 2))],
)
def test_what_counts_as_a_tie(dtype: str, expected: tuple[int, int, int]) -> None:
    gaps = (5e-5, 0.02, 0.2, None)
    parted = [
        turn(q, 5, 1.0, lossless={"identical": False, "at": 3, "gap": gap})
        for q, gap in enumerate(gaps)
    ]
    same = turn(9, 5, 1.0, lossless={"identical": True, "at": None, "gap": None})
    found = own.greedy_texts(turns(*parted, same, turn(10, 5, 1.0)), dtype)
    assert (found["identical"], found["tied"], found["other"]) == expected
    assert found["unknown"] == 1
    assert found["gap"] == 0.2
