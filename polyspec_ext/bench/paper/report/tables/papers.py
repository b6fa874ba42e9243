"""What the papers print."""

from __future__ import annotations

from typing import Any

from .. import printed
from ..form import NONE, Column, Record, Table, number, word
from .compared import task_name


def as_printed() -> Table:
    """Tables 2 and 3 as the paper has them."""
    tasks = (*printed.TASKS, printed.OVERALL)
    records = []
    for (target, system), cells in printed.SPEEDUPS.items():
        record: dict[str, Any] = {"target": target, "system": system}
        for task in tasks:
            cell = cells.get(task)
            record[f"{task}_speedup"] = None if cell is None else cell.speedup
            record[f"{task}_length"] = None if cell is None else cell.length
        records.append(record)

    def column(task: str) -> Column:
        speed, length = number(f"{task}_speedup"), number(f"{task}_length")

        def text(record: Record) -> str:
            if record[f"{task}_speedup"] is None:
                return NONE
            return f"{speed(record)} / {length(record)}"

        return Column(task_name(task), text)

    return Table(
        "printed",
        "What the papers print",
        "Speedup / mean accepted length on an A800, as printed. Known inconsistencies: "
        + " ".join(printed.INCONSISTENCIES),
        [
            Column("target", word("target"), words=True),
            Column("system", word("system"), words=True),
            *(column(task) for task in tasks),
        ],
        records,
    )
