"""The papers' figures of a run, as PNG; matplotlib is an optional dependency."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from polyspec_ext import drawing
from polyspec_ext.bench import plot

from . import printed
from .form import Record
from .saved import Saved
from .tables import by_task, overall, variances

# By number of levels; what is not this engine's, and plain decoding, is grey.
_COLOURS = {2: "#3b75af", 3: "#d1762c", 4: "#4a8c4f"}
_GREY, _PAPER, _BAND = "#8a8f98", "#111111", "#e8e2d0"
_MOST_LINES = 4  # in a panel of Figure 4


def of_run(run: Saved) -> dict[str, bytes]:
    """By name, the figures of a run that it has something for; none without matplotlib."""
    if not plot.available():
        return {}
    return _png({"figure2": _bars(run), "figure3": _by_task(run), "figure4": _variances([run])})


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


def _panel(axis: Any, run: Saved, records: Sequence[Record], task: str | None) -> None:
    """Horizontal bars of the speedups of every record, with intervals and the paper's numbers."""
    prefix = "" if task is None else f"{task}_"
    for at, record in enumerate(records):
        value = record[f"{prefix}speedup"]
        if value is not None:
            low, high = record[f"{prefix}speedup_low"], record[f"{prefix}speedup_high"]
            error = None if low is None else [[max(value - low, 0)], [max(high - value, 0)]]
            axis.barh(
                at, value, color=_colour(run.methods[record["method"]]), height=0.7, xerr=error,
                error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
            )  # fmt: skip
            axis.text(0.03, at, f"{value:.2f}", va="center", fontsize=7, color="white")
        paper = record[f"{prefix}paper_speedup"]
        if paper is not None:
            axis.plot(paper, at, marker="D", markersize=5, color=_PAPER, linestyle="")
    axis.set_yticks(range(len(records)), [str(record["label"]) for record in records], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", labelsize=8)


def _bars(run: Saved) -> Any:
    records = [record for record in overall(run).records if record["speedup"] is not None]
    if not records:
        return None
    size = (8, 1.2 + 0.32 * len(records))
    figure, axis = drawing.pyplot().subplots(figsize=size, layout="constrained")
    _panel(axis, run, records, None)
    axis.set_xlabel(_caption(run, records, ""), fontsize=8)
    return figure


def _by_task(run: Saved) -> Any:
    tasks = run.tasks
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
        figsize=(2.4 + 2.8 * columns, 0.6 + rows * (0.6 + 0.26 * len(records))),
    )  # fmt: skip
    for task, axis in zip(tasks, axes.flat, strict=False):
        _panel(axis, run, records, task)
        axis.set_title(printed.task_name(task), fontsize=9)
    for axis in axes.flat:  # (They share one axis, which every panel has turned around.)
        axis.set_ylim(len(records) - 0.5, -0.5)
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_visible(False)
    figure.supxlabel(_caption(run, records, f"{tasks[0]}_"), fontsize=8)
    return figure


def _caption(run: Saved, records: Sequence[Record], prefix: str) -> str:
    paper = any(record[f"{prefix}paper_speedup"] is not None for record in records)
    return (
        f"speedup over {run.methods[run.baseline]['label']}, 95 % interval; blue: two levels, "
        "orange: three, green: more" + ("; diamonds: the paper's" if paper else "")
    )


def _variances(runs: Sequence[Saved]) -> Any:
    shown = [(run, table) for run in runs if (table := variances(run)).records]
    if not shown:
        return None
    figure, axes = drawing.pyplot().subplots(
        1, len(shown), squeeze=False, figsize=(1 + 6 * len(shown), 3.6), layout="constrained"
    )
    for (run, table), axis in zip(shown, axes.flat, strict=True):
        if printed.target_of(run.target) is not None:
            low, high = printed.VARIANCES[run.sampling]
            axis.axhspan(low, high, color=_BAND, label="the paper's, mostly", zorder=0)
        for name in _most_levels(run, table.records):
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


def _most_levels(run: Saved, records: Sequence[Record]) -> list[str]:
    """The methods that a panel has room for: those of the most levels first."""
    there = [name for name in run.methods if name in records[0]]
    ordered = sorted(there, key=lambda name: -len(run.methods[name]["levels"]))
    return [name for name in there if name in ordered[:_MOST_LINES]]
