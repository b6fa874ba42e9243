"""What single questions and turns show: the variance of the acceptance length, and failures."""

from __future__ import annotations

from collections import Counter

from .. import printed, statistics
from ..form import Cell, Table, method_cell, number, word
from ..saved import Saved


def variances(run: Saved) -> Table:
    """Figure 4: the variance of the acceptance length, by query."""
    found = {
        name: own
        for name, method in run.methods.items()
        if len(method["levels"]) > 1 and (own := statistics.length_variances(run.turns[name]))
    }
    tasks = {turn.question_id: turn.task for turn in run.lines}
    low, high = printed.VARIANCES[run.sampling]
    return Table(
        "figure4",
        f"Variance of the acceptance length by query, {run.sampling} (Figure 4)",
        "Over all verifications by the target of a question's turns. The paper's, of its chain of "
        f"three levels, lie mostly between {low:g} and {high:g}.",
        [
            [
                word("question", "question_id", question),
                Cell({"task": task}, "task", printed.TASK_NAMES[task], words=True),
                *(
                    number(run.methods[name]["label"], name, own.get(question), 1)
                    for name, own in found.items()
                ),
            ]
            for question, task in tasks.items()
            if any(question in own for own in found.values())
        ],
    )


def failures(run: Saved) -> Table:
    """Turns that failed, and why."""
    counted = Counter(
        (name, turn.error) for name in run.methods for turn in run.failed if turn.method == name
    )
    return Table(
        "failures",
        "Failed turns",
        "They are in no number; what a method is compared with leaves out the same turns.",
        [
            [
                method_cell(name, run.methods[name]["label"]),
                number("turns", "turns", count, 0),
                word("error", "error", error),
            ]
            for (name, error), count in counted.items()
        ],
    )
