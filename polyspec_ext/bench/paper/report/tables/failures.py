"""Turns that failed."""

from __future__ import annotations

from collections import Counter

from ..form import Column, Table, number, word
from ..saved import Saved


def failures(run: Saved) -> Table:
    """Turns that failed, and why."""
    counted: Counter[tuple[str, str]] = Counter()
    for name in run.methods:
        for turn in run.failed[name]:
            counted[name, str(turn.error)] += 1
    return Table(
        "failures",
        "Failed turns",
        "They are in no number; what a method is compared with leaves out the same turns.",
        [
            Column("method", word("label"), words=True),
            Column("turns", number("turns", 0)),
            Column("error", word("error"), words=True),
        ],
        [
            {"method": name, "label": run.methods[name]["label"], "turns": n, "error": error}
            for (name, error), n in counted.items()
        ],
    )
