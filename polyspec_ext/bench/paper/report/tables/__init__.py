"""The tables of one run, and those over several."""

from __future__ import annotations

from collections.abc import Sequence

from ..form import Table
from ..saved import Saved
from .adaptation import adaptation
from .compared import task_name
from .costs import levels, passes, times
from .failures import failures
from .insertions import insertions
from .papers import as_printed
from .predictions import predictions
from .speedups import by_task, larger_targets, overall, side_by_side
from .variances import variances

__all__ = ["as_printed", "by_task", "of_run", "of_several", "overall", "task_name", "variances"]


def of_run(run: Saved) -> list[Table]:
    """The tables of one run that it has something for."""
    found = [
        overall(run),
        by_task(run),
        levels(run),
        times(run),
        passes(run),
        predictions(run),
        insertions(run),
        adaptation(run),
        variances(run),
        failures(run),
    ]
    return [table for table in found if table.records]


def of_several(runs: Sequence[Saved]) -> list[Table]:
    """Repeats of a run side by side, a table for each kind; and the targets beside each other."""
    groups: dict[str, list[Saved]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    found = [side_by_side(group, place) for place, group in enumerate(repeated, 1)]
    return [*found, larger_targets(runs)]
