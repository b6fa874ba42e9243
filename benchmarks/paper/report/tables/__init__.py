"""The tables of one run, and those over several."""

from __future__ import annotations

from collections.abc import Sequence

from ..form import Table
from ..saved import Saved
from .adaptation import adaptation
from .costs import levels, passes, predictions, times
from .insertions import insertions
from .speedups import as_printed, by_task, larger_targets, overall, side_by_side
from .turns import failures, variances

__all__ = ["by_task", "of_run", "of_several", "overall", "variances"]


def of_run(run: Saved) -> list[Table]:
    """The tables of one run that it has something for."""
    every = (
        overall, by_task, levels, times, passes, predictions, insertions, adaptation, variances,
        failures,
    )  # fmt: skip
    return [table for make in every if (table := make(run)).rows]


def of_several(runs: Sequence[Saved]) -> list[Table]:
    """Repeats of a run side by side, a table for each kind; the targets beside each other; and what
    the papers print."""
    groups: dict[str, list[Saved]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    found = [side_by_side(group, place) for place, group in enumerate(repeated, 1)]
    return [table for table in (*found, larger_targets(runs), as_printed()) if table.rows]
