"""A plot of a report: median and quartiles of every contender in every case, as PNG."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from polyspec_ext import drawing

MISSING = (
    "no plot will be drawn: matplotlib is not installed; "
    "pip install 'polyspec_ext[bench]' brings it"
)


def available() -> bool:
    """Whether a plot can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the plot: a panel per operator, points are medians, whiskers quartiles, time is
    logarithmic, each contender keeps its colour. ImportError without matplotlib."""
    pyplot = drawing.pyplot()
    panels: dict[str, list[dict[str, Any]]] = {}
    for case in report["cases"]:
        panels.setdefault(case["operator"], []).append(case)
    rows = [row for case in report["cases"] for row in case["rows"]]
    names = list(dict.fromkeys(row["name"] for row in rows))
    colours = dict(zip(names, pyplot.get_cmap("tab10").colors * len(names), strict=False))
    heights = [sum(len(case["rows"]) + 1 for case in cases) for cases in panels.values()]
    height = 0.16 * sum(heights) + 1.2 * len(heights) + 1
    figure, axes = pyplot.subplots(
        len(panels), 1, squeeze=False, figsize=(11, height),
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, (operator, cases) in zip(axes[:, 0], panels.items(), strict=True):
        at, ticks, labels = 0, [], []
        for case in cases:
            first = at
            for row in case["rows"]:
                low, high = row["median_us"] - row["q25_us"], row["q75_us"] - row["median_us"]
                axis.errorbar(
                    row["median_us"], at, xerr=[[low], [high]], color=colours[row["name"]],
                    fmt="o", markersize=4, capsize=2, linewidth=1,
                )  # fmt: skip
                at += 1
            ticks.append((first + at - 1) / 2)
            labels.append(_label(case))
            at += 1
        axis.set_yticks(ticks, labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_title(operator, fontsize=9, loc="left")
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel("microseconds per call, median and quartiles", fontsize=7)
    handles = [pyplot.Line2D([], [], marker="o", ls="", color=colours[name]) for name in names]
    figure.legend(handles, names, loc="upper center", ncols=3, fontsize=7)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.8 / figure.get_figheight()))
    drawing.save(figure, path)


def _label(case: dict[str, Any]) -> str:
    parts = [f"B {case['batch']}"]
    if case["draft_len"]:
        parts.append(f"K {case['draft_len']}, a {case['acceptance']['asked']:g}")
    parts += [f"V {case['vocab']}", case["dtype"]]
    text = ", ".join(parts)
    return text if case["filters"] == "none" else f"{text}\n{case['filters']}"
