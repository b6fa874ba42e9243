"""Table 1: whether a model in the middle pays, by Theorem 3.2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from polyspec_ext.planning.theory import insertion_bound

from .. import printed, statistics
from ..form import Cell, Table, hidden, interval, number, word
from ..printed import Insertion
from ..saved import Saved
from ..statistics import Interval, Sums, sums

_ASKED = ("chain", "eagle")  # kinds of methods whose levels were asked for


def insertions(run: Saved) -> Table:
    """Table 1: the insertion test with the run's own T and L, then the paper's."""
    rows = [row for pair in _pairs(run) if (row := _measured(run, *pair)) is not None]
    if rows:
        rows += [_row("paper", row, None, None) for row in printed.INSERTIONS]
    return Table(
        "table1",
        "Does the model in the middle pay? (Table 1)",
        "Theorem 3.2 with L and T as measured: condition (1) T_new/T_i < L_new (1/L_i - "
        "1/L_{i-new}), L_i and T_i those of the chain without the new model. Lemma 3.1 before "
        "against after has each chain's own passes, and counts those of M_new by M_i's tokens: "
        "L_new counts tokens that M_i rejects as well. The paper prints no passes, so its rows "
        "have no such verdict.",
        rows,
    )


def _pairs(run: Saved) -> Iterator[tuple[str, str, int]]:
    """Methods with and without one model between two others, and the new one's place."""
    asked = [name for name, method in run.methods.items() if method["kind"] in _ASKED]
    for after, before in itertools.product(asked, asked):
        longer, shorter = run.methods[after]["levels"], run.methods[before]["levels"]
        for place in range(1, len(longer) - 1):
            if [*longer[:place], *longer[place + 1 :]] == shorter:
                yield before, after, place


def _measured(run: Saved, before: str, after: str, place: int) -> list[Cell] | None:
    """One pair of methods; None where a level of theirs never ran."""
    old, new = sums(run.turns[before])[2], sums(run.turns[after])[2]
    if len(old) < place + 1 or len(new) < place + 2:
        return None
    above, below, own = old[place - 1], old[place], new[place]
    three = (new[place - 1], own, above)
    if any(not level.verified for level in three) or not (own.passes and above.passes):
        return None
    length_of_new, new_length, length = (level.accepted / level.verified for level in three)
    t_i, t_new, t_below = (1e3 * (level.pass_seconds or 0.0) for level in (above, own, below))
    base = run.turns[run.baseline]
    speeds = (statistics.speedup(run.turns[name], base) for name in (before, after))
    row = Insertion(
        f"{run.methods[after]['label']} (without: {run.methods[before]['label']})",
        t_i, length_of_new, t_new, new_length, t_below, length,
        *(None if speed is None else speed.value for speed in speeds),
    )  # fmt: skip
    gain = statistics.speedup(run.turns[after], run.turns[before])
    return _row("measured", row, _exact_bound(old, new, place), gain)


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


def _row(
    source: str, row: Insertion, exact_bound: float | None, gain: Interval | None
) -> list[Cell]:
    ratio = row.t_new / row.t_i
    bound = insertion_bound(row.length, row.length_of_new, row.new_length)
    exact = None if exact_bound is None else _verdict(row.t_new < exact_bound)
    return [
        word("case", "case", row.case),
        word("numbers", "source", source),
        number("T_i, ms", "t_i", row.t_i),
        number("L_{i-new}", "length_of_new", row.length_of_new),
        number("T_new, ms", "t_new", row.t_new),
        number("L_new", "new_length", row.new_length),
        number("T_{i+1}, ms", "t_below", row.t_below),
        number("L_i", "length", row.length),
        number("T_new/T_i", "ratio_above", ratio, 3),
        number("bound (1)", "bound_above", bound, 3),
        word("(1)", "condition_1", _verdict(ratio < bound)),
        hidden(exact_bound=exact_bound),
        word("Lemma 3.1", "exact", exact),
        number("speedup before", "before", row.before, ratio=True),
        number("after", "after", row.after, ratio=True),
        interval("after / before", "gain", gain, ratio=True),
    ]


def _verdict(helps: bool) -> str:
    return "helps" if helps else "does not"
