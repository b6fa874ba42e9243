"""Table 1: whether a model in the middle pays, by Theorem 3.2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from polyspec_ext.planning.theory import InsertionTest, insertion_test

from .. import printed, statistics
from ..form import Column, Table, below_one, interval, number, word
from ..saved import Saved
from ..statistics import Interval
from .compared import spread
from .sums import Sums, sums

_ASKED = ("chain", "eagle")  # kinds of methods whose levels were asked for


def _pairs(run: Saved) -> Iterator[tuple[str, str, int]]:
    """Methods with and without one model between two others, and the new one's place."""
    asked = [name for name, method in run.methods.items() if method["kind"] in _ASKED]
    for after, before in itertools.product(asked, asked):
        longer, shorter = run.methods[after]["levels"], run.methods[before]["levels"]
        for place in range(1, len(longer) - 1):
            if [*longer[:place], *longer[place + 1 :]] == shorter:
                yield before, after, place


def insertions(run: Saved) -> Table:
    """Table 1: the insertion test with the run's own T and L, then the paper's."""
    records = []
    base = run.turns[run.baseline]
    for before, after, place in _pairs(run):
        old, new = sums(run.turns[before])[2], sums(run.turns[after])[2]
        if len(old) < place + 1 or len(new) < place + 2:
            continue
        above, below, own = old[place - 1], old[place], new[place]
        three = (above, new[place - 1], own)
        if any(not level.verified for level in three) or not (own.passes and above.passes):
            continue
        seconds, new_seconds, seconds_below = (
            1e3 * (level.pass_seconds or 0.0) for level in (above, own, below)
        )
        length, length_of_new, new_length = (level.accepted / level.verified for level in three)
        test = insertion_test(
            seconds, new_seconds, seconds_below, length, length_of_new, new_length,
            below.passes / above.verified,
        )  # fmt: skip
        ratio = statistics.speedup(run.turns[after], run.turns[before])
        speeds = [statistics.speedup(run.turns[name], base) for name in (before, after)]
        case = f"{run.methods[after]['label']} (without: {run.methods[before]['label']})"
        records.append(
            _insertion(
                case, "measured", seconds, length_of_new, new_seconds, new_length, seconds_below,
                length, test, _exact_bound(old, new, place),
                [None if s is None else s.value for s in speeds], ratio,
            )
        )  # fmt: skip
    for row in printed.INSERTIONS if records else ():
        test = insertion_test(
            row.seconds, row.new_seconds, row.seconds_below, row.length, row.length_of_new,
            row.new_length, 1.0,
        )  # fmt: skip
        records.append(
            _insertion(row.case, "paper", *row[1:7], test, None, [row.before, row.after], None)
        )
    return Table(
        "table1",
        "Does the model in the middle pay? (Table 1)",
        "Theorem 3.2 with L and T as measured: condition (1) T_new/T_i < L_new (1/L_i - "
        "1/L_{i-new}), L_i and T_i those of the chain without the new model. Lemma 3.1 before "
        "against after has each chain's own passes, and counts those of M_new by M_i's tokens: "
        "L_new counts tokens that M_i rejects as well. The paper prints no passes, so its rows "
        "have no such verdict.",
        [
            Column("case", word("case"), words=True),
            Column("numbers", word("source"), words=True),
            Column("T_i, ms", number("t_i")),
            Column("L_{i-new}", number("length_of_new")),
            Column("T_new, ms", number("t_new")),
            Column("L_new", number("new_length")),
            Column("T_{i+1}, ms", number("t_below")),
            Column("L_i", number("length")),
            Column("T_new/T_i", number("ratio_above", 3)),
            Column("bound (1)", number("bound_above", 3)),
            Column("(1)", word("condition_1"), words=True),
            Column("Lemma 3.1", word("exact"), words=True),
            Column("speedup before", number("before"), loses=below_one("before")),
            Column("after", number("after"), loses=below_one("after")),
            Column("after / before", interval("gain"), loses=below_one("gain")),
        ],
        records,
    )


def _exact_bound(old: Sequence[Sums], new: Sequence[Sums], place: int) -> float:
    """The most milliseconds that a pass of M_new may take if M_i and what is below it are to take
    no longer per token of M_i than without it. That is Lemma 3.1 with ``N / L`` as what it stands
    for, the number of a level's passes.

    Args:
        old, new: levels without M_new and with it, which is ``new[place]``.
    """
    tokens = new[place - 1].accepted
    before = sum(level.seconds for level in old[place - 1 :]) / old[place - 1].accepted
    others = sum(level.seconds for level in (new[place - 1], *new[place + 1 :])) / tokens
    return 1e3 * (before - others) * tokens / new[place].passes


def _insertion(
    case: str,
    source: str,
    seconds: float,
    length_of_new: float,
    new_seconds: float,
    new_length: float,
    seconds_below: float,
    length: float,
    test: InsertionTest,
    exact_bound: float | None,
    speedups: Sequence[float | None],
    gain: Interval | None,
) -> dict[str, Any]:
    return {
        "case": case,
        "source": source,
        "t_i": seconds,
        "length_of_new": length_of_new,
        "t_new": new_seconds,
        "new_length": new_length,
        "t_below": seconds_below,
        "length": length,
        "ratio_above": test.ratio_above,
        "bound_above": test.bound_above,
        "condition_1": _verdict(test.above),
        "exact_bound": exact_bound,
        "exact": None if exact_bound is None else _verdict(new_seconds < exact_bound),
        "before": speedups[0],
        "after": speedups[1],
        **spread("gain", gain),
    }


def _verdict(helps: bool) -> str:
    return "helps" if helps else "does not"
