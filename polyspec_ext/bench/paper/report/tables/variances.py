"""Figure 4: the variance of the acceptance length by query."""

from __future__ import annotations

from .. import printed, statistics
from ..form import Column, Table, number, word
from ..saved import Saved
from .compared import task_name


def variances(run: Saved) -> Table:
    """Figure 4: the variance of the acceptance length, by query."""
    found = {
        name: statistics.length_variances(run.turns[name])
        for name, method in run.methods.items()
        if len(method["levels"]) > 1
    }
    found = {name: own for name, own in found.items() if own}
    tasks = {turn.question_id: turn.task for turn in run.lines}
    questions = [q for q in tasks if any(q in own for own in found.values())]
    records = [
        {
            "question_id": question,
            "task": tasks[question],
            **{name: own.get(question) for name, own in found.items()},
        }
        for question in questions
    ]
    low, high = printed.VARIANCES[run.sampling]
    return Table(
        "figure4",
        f"Variance of the acceptance length by query, {run.sampling} (Figure 4)",
        "Over all verifications by the target of a question's turns. The paper's, of its chain of "
        f"three levels, lie mostly between {low:g} and {high:g}.",
        [
            Column("question", word("question_id"), words=True),
            Column("task", lambda record: task_name(str(record["task"])), words=True),
            *(Column(str(run.methods[name]["label"]), number(name, 1)) for name in found),
        ],
        records,
    )
