"""The papers' figures of a run, as PNG; matplotlib is an optional dependency."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import plot
from polyspec_ext import drawing

from . import printed
from .printed import OVERALL
from .saved import Saved
from .tables import by_task, variances

# By number of levels; what is not this engine's, and plain decoding, is grey.
_COLOURS = {2: "#3b75af", 3: "#d1762c", 4: "#4a8c4f"}
_GREY, _PAPER, _BAND = "#8a8f98", "#111111", "#e8e2d0"
_MOST_LINES = 4  # in a panel of Figure 4


def of_run(run: Saved) -> dict[str, bytes]:
    """By name, the figures of a run that it has something for; none without matplotlib."""
    if not plot.available():
        return {}
    overall, tasks = _speedups(run, [OVERALL], 5.6, 0.32), _speedups(run, run.tasks, 2.8, 0.26)
    return _png({"figure2": overall, "figure3": tasks, "figure4": _variances([run])})


def of_several(runs: Sequence[Saved]) -> dict[str, bytes]:
    """Figure 4 of runs of the same models, sampled and greedy, side by side."""
    if not plot.available():
        return {}
    groups: dict[str, list[Saved]] = {}
    for run in runs:
        groups.setdefault(run.models_key, []).append(run)
    several = [group for group in groups.values() if len({run.sampling for run in group}) > 1]
    return _png({f"figure4-{at}": _variances(group) for at, group in enumerate(several, 1)})


def _png(figures: Mapping[str, Any]) -> dict[str, bytes]:
    found = {}
    for name, figure in figures.items():
        if figure is not None:
            file = io.BytesIO()
            drawing.save(figure, file)
            found[name] = file.getvalue()
    return found


def _colour(method: Mapping[str, Any]) -> str:
    own = len(method["levels"]) > 1 and method["kind"] != "assisted"
    return _COLOURS.get(min(len(method["levels"]), 4), _GREY) if own else _GREY


def _speedups(run: Saved, tasks: Sequence[str], width: float, height: float) -> Any:
    """A panel for each task: horizontal bars with intervals, and the paper's numbers.

    Args:
        width: of a panel; height: of a bar; inches.
    """
    records = [
        record
        for record in by_task(run).records
        if any(record[f"{task}_speedup"] is not None for task in tasks)
    ]
    if not records:
        return None
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    figure, axes = drawing.pyplot().subplots(
        rows, columns, squeeze=False, sharey=True, sharex=True, layout="constrained",
        figsize=(2.4 + width * columns, 0.6 + rows * (0.6 + height * len(records))),
    )  # fmt: skip
    for task, axis in zip(tasks, axes.flat, strict=False):
        for at, record in enumerate(records):
            _bar(axis, at, record, task, _colour(run.methods[record["method"]]))
        axis.set_yticks(range(len(records)), [record["label"] for record in records], fontsize=8)
        axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(printed.TASK_NAMES[task], fontsize=9)
    axes.flat[0].set_ylim(len(records) - 0.5, -0.5)  # (All panels share one axis.)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    paper = any(record[f"{tasks[0]}_paper_speedup"] is not None for record in records)
    caption = (
        f"speedup over {run.methods[run.baseline]['label']}, 95 % interval; blue: two levels, "
        "orange: three, green: more" + ("; diamonds: the paper's" if paper else "")
    )
    figure.supxlabel(caption, fontsize=8)
    return figure


def _bar(axis: Any, at: int, record: Mapping[str, Any], task: str, colour: str) -> None:
    value, low, high, paper = (
        record[f"{task}_{name}"]
        for name in ("speedup", "speedup_low", "speedup_high", "paper_speedup")
    )
    if value is not None:
        error = None if low is None else [[max(value - low, 0)], [max(high - value, 0)]]
        axis.barh(
            at, value, color=colour, height=0.7, xerr=error,
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )  # fmt: skip
        axis.text(0.03, at, f"{value:.2f}", va="center", fontsize=7, color="white")
    if paper is not None:
        axis.plot(paper, at, marker="D", markersize=5, color=_PAPER, linestyle="")


def _variances(runs: Sequence[Saved]) -> Any:
    shown = [(run, table) for run in runs if (table := variances(run)).rows]
    if not shown:
        return None
    figure, axes = drawing.pyplot().subplots(
        1, len(shown), squeeze=False, figsize=(1 + 6 * len(shown), 3.6), layout="constrained"
    )
    for (run, table), axis in zip(shown, axes.flat, strict=True):
        if printed.target_of(run.target) is not None:
            low, high = printed.VARIANCES[run.sampling]
            axis.axhspan(low, high, color=_BAND, label="the paper's, mostly", zorder=0)
        # What a panel has room for: those of the most levels first.
        names = [name for name in run.methods if name in table.records[0]]
        most = sorted(names, key=lambda name: -len(run.methods[name]["levels"]))[:_MOST_LINES]
        for name in (name for name in names if name in most):
            values = [record[name] for record in table.records]
            axis.plot(
                range(1, len(values) + 1),
                [float("nan") if value is None else value for value in values],
                marker="o", markersize=3, linewidth=0.8, label=run.methods[name]["label"],
            )  # fmt: skip
        axis.set_title(f"{run.label}: {run.sampling}", fontsize=9)
        axis.set_xlabel("query", fontsize=8)
        axis.set_ylabel("variance of the acceptance length", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    return figure
