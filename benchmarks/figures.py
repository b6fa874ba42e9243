"""The papers' figures of a run, as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .questions import OVERALL, TASK_NAMES

# By number of levels; plain decoding and other engines are grey.
_COLOURS = {2: "#3b75af", 3: "#d1762c", 4: "#4a8c4f"}
_MOST_LINES = 4  # in a panel of Figure 4
Records = Sequence[Mapping[str, Any]]


def of_run(run: Any, by_task: Records, variances: Records) -> dict[str, bytes]:
    """Return the figures of a `report.Run` that have data, by name."""
    images = {}
    if any(row[f"{OVERALL}_speedup"] is not None for row in by_task):
        images["figure2"] = _speedups(run, by_task, [OVERALL], 5.6, 0.32)
        images["figure3"] = _speedups(run, by_task, run.tasks, 2.8, 0.26)
    if variances:
        images["figure4"] = _variances(run, variances)
    return images


def _png(figure: Figure) -> bytes:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def _speedups(
    run: Any, records: Records, tasks: Sequence[str], width: float, height: float
) -> bytes:
    """Draw a panel for each task, `width` inches wide: horizontal bars with intervals, `height`
    inches high, and the paper's numbers."""
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    size = 2.4 + width * columns, 0.6 + rows * (0.6 + height * len(records))
    figure = Figure(size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flat)
    frame, places = pd.DataFrame(records), range(len(records))
    methods = [run.methods[name] for name in frame.method]
    counts = [0 if method["kind"] == "assisted" else len(method["levels"]) for method in methods]
    colours = [_COLOURS.get(min(count, 4), "#8a8f98") for count in counts]
    for task, axis in zip(tasks, axes, strict=False):
        names = (f"{task}_speedup", f"{task}_speedup_low", f"{task}_speedup_high")
        value, low, high = (frame[name].astype(float) for name in names)
        error = np.clip([value - low, high - value], 0, None)
        bars = axis.barh(places, value, 0.7, color=colours, xerr=error, error_kw={"capsize": 2})
        axis.bar_label(bars, fmt="%.2f", label_type="center", fontsize=7, color="white")
        axis.plot(frame[f"{task}_paper_speedup"].astype(float), places, "D", color="#111111")
        axis.set_yticks(places, frame.label)
        axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        axis.set_title(TASK_NAMES[task], fontsize=9)
    axes[0].set_ylim(len(records) - 0.5, -0.5)  # (All panels share the axis.)
    for axis in axes[len(tasks) :]:
        axis.remove()
    figure.supxlabel(
        f"speedup over {run.labels[run.baseline]}, 95 % interval; blue: two levels, "
        "orange: three, green: more; diamonds: the paper's",
        fontsize=8,
    )
    return _png(figure)


def _variances(run: Any, records: Records) -> bytes:
    figure = Figure((7, 3.6), layout="constrained")
    axis = figure.subplots()
    if run.paper is not None:
        axis.axhspan(*run.variances, color="#e8e2d0", label="the paper's, mostly", zorder=0)
    # The panel has room for a few lines: methods with the most levels first.
    names = [name for name in run.methods if name in records[0]]
    most = sorted(names, key=lambda name: -len(run.methods[name]["levels"]))[:_MOST_LINES]
    values = pd.DataFrame(records)[[name for name in names if name in most]].astype(float)
    axis.plot(values.index + 1, values, ".-", label=[run.labels[name] for name in values])
    axis.set_title(f"{run.label}: {run.sampling}", fontsize=9)
    axis.set(xlabel="query", ylabel="variance of the acceptance length")
    axis.legend(fontsize=7, frameon=False)
    return _png(figure)
