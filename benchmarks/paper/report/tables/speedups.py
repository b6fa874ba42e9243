"""Speedups: over all tasks, by task, by run and by target (Tables 2 and 3, Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import output

from ...questions import TASKS
from .. import printed, statistics
from ..form import Cell, Table, bounded, hidden, interval, method_cell, number, word
from ..saved import Saved
from ..statistics import Interval

_LOSSLESS = ("identical", "tied", "other", "gap", "unknown", "z", "p_value", "texts")


def windows_of(method: Mapping[str, Any]) -> str:
    """Of a method, in words: its windows, tail, tree and policy."""
    tree = ", ".join(f"{name} {value}" for name, value in (method.get("tree") or {}).items())
    parts = (
        ", ".join(map(str, method.get("windows") or ())),
        f"tail {method['tail']}" if method.get("tail") else "",
        f"tree {tree}" if tree else "",
        method.get("policy"),
    )
    return "; ".join(part for part in parts if part)


class _Compared(NamedTuple):
    """A method's speedup and mean accepted length in a task, over the turns that neither it nor
    the baseline failed, and what the paper prints."""

    speedup: Interval | None
    length: Interval | None
    turns: int
    paper: printed.Result | None

    def cells(self) -> tuple[Cell, Cell, Cell]:
        """Speedup, length and turns."""
        speedup, length = self.paper or (None, None)
        paper = {"paper_speedup": speedup}, {"paper_length": length}
        return (
            interval("speedup", "speedup", self.speedup, ratio=True, paper=paper[0]),
            interval("mean accepted", "length", self.length, paper=paper[1]),
            number("turns", "turns", self.turns, 0),
        )


def _compared(run: Saved, name: str, task: str) -> _Compared:
    ours, theirs = run.of_task(name, task), run.of_task(run.baseline, task)
    keys = statistics.same_turns(ours, theirs)
    target, system = printed.target_of(run.target), printed.system_of(run.methods[name])
    paper = printed.SPEEDUPS.get((target or "", system or ""), {}).get(task)
    length = statistics.pooled_length(ours, keys)
    return _Compared(statistics.speedup(ours, theirs), length, len(keys), paper)


def _best_two_levels(run: Saved) -> str | None:
    """The fastest of the methods of two levels in this engine."""
    base = run.turns[run.baseline]
    found = {
        name: value.value
        for name, method in run.methods.items()
        if len(method["levels"]) == 2 and method["kind"] not in ("assisted", "engine")
        if (value := statistics.speedup(run.turns[name], base)) is not None
    }
    return max(found, key=lambda name: found[name], default=None)


def _lossless(run: Saved, name: str) -> dict[str, Any]:
    """What the losslessness column is made of; None where it does not apply."""
    found: dict[str, Any] = dict.fromkeys(_LOSSLESS)
    if run.sampling == "sampled":
        return found | statistics.sampled_texts(run.turns[name])
    if name == run.baseline:
        return found
    return found | statistics.greedy_texts(run.turns[name], run.target["dtype"])


def _lossless_text(record: Mapping[str, Any]) -> str:
    if record["z"] is not None:
        return f"p = {record['p_value']:.2g} (z {record['z']:+.1f}, {record['texts']} texts)"
    if record["identical"] is None:
        return "-"
    known = record["identical"] + record["tied"] + record["other"]
    if not known:
        return "not compared"
    parts = [f"{record['identical']} of {known} identical"]
    if record["tied"]:
        parts.append(f"{record['tied']} tied")
    if record["other"]:
        parts.append(f"{record['other']} DIFFER")
    if record["gap"] is not None:
        parts.append(f"gap <= {record['gap']:.1e}")
    if record["unknown"]:
        parts.append(f"{record['unknown']} not compared")
    return ", ".join(parts)


def overall(run: Saved) -> Table:
    """Every method over all tasks (Figure 2)."""
    two = _best_two_levels(run)
    rows = []
    losing = 0
    for name, method in run.methods.items():
        over_two = None
        if two is not None and len(method["levels"]) > 2:
            over_two = statistics.speedup(run.turns[name], run.turns[two])
        speedup, length, turns = _compared(run, name, printed.OVERALL).cells()
        lossless = _lossless(run, name)
        losing += speedup.loses
        rows.append(
            [
                method_cell(name, method["label"]),
                hidden(kind=method["kind"], levels=" <- ".join(method["levels"])),
                word("windows", "windows", windows_of(method)),
                number("tokens/s", "tokens_per_second", statistics.rate(run.turns[name]), 1),
                speedup,
                interval("over best two levels", "over_two_levels", over_two, ratio=True),
                length,
                turns,
                number("failed", "failed", sum(turn.method == name for turn in run.failed), 0),
                Cell(lossless, "lossless", _lossless_text(lossless), words=True),
            ]
        )
    best = "" if two is None else f" The best two levels: {run.methods[two]['label']}."
    return Table(
        "overall",
        "Overall (Figure 2)",
        f"Speedup over {run.methods[run.baseline]['label']}: new tokens per second of wall time, "
        "prefill included, over the same turns, per repeat, then the median; in brackets the 95 % "
        "bootstrap interval over questions. Mean accepted length: tokens per verification of the "
        "target, its correction or bonus included, pooled. Lossless: "
        + (
            "texts beside the baseline's of the same prompts; tied: parted where the target's two "
            "largest logits are a tie of rounding."
            if run.sampling == "greedy"
            else _p_values(rows)
        )
        + f"{best} Slower than the baseline: {losing} of {len(rows) - 1}.",
        rows,
    )


def _p_values(rows: Sequence[Sequence[Cell]]) -> str:
    count = sum(cell.values.get("p_value") is not None for row in rows for cell in row)
    return (
        "p-value of the texts' likelihood being as far from its mean under the target. "
        f"{count} p-values are in this table: by chance one is below {0.05 / max(count, 1):.2g} in "
        "5 of 100 such tables."
    )


def by_task(run: Saved) -> Table:
    """Table 2: speedup and mean accepted length per task and overall."""

    def cell(name: str, task: str) -> Cell:
        found = _compared(run, name, task)
        cells = found.cells()
        values = {f"{task}_{key}": value for one in cells for key, value in one.values.items()}
        length = None if found.length is None else found.length.value
        text = f"{bounded(found.speedup)} / {output.number(length, '.2f')}"
        if found.paper is not None:
            text += f" (paper {found.paper.speedup:.2f} / {found.paper.length:.2f})"
        return Cell(values, printed.TASK_NAMES[task], text, loses=cells[0].loses)

    return Table(
        "table2",
        "Speedup / mean accepted length by task (Table 2)",
        "As above, for each task by itself.",
        [
            [
                method_cell(name, method["label"]),
                *(cell(name, task) for task in (*run.tasks, printed.OVERALL)),
            ]
            for name, method in run.methods.items()
        ],
    )


def side_by_side(runs: Sequence[Saved], place: int) -> Table:
    """Runs of the same models and settings: the overall speedup of each."""
    labels: dict[tuple[str, str], str] = {}
    for run in runs:
        for name, method in run.methods.items():
            labels.setdefault((name, windows_of(method)), method["label"])

    def cell(at: int, run: Saved, name: str, windows: str) -> Cell:
        found = None
        if name in run.methods and windows_of(run.methods[name]) == windows:
            found = statistics.speedup(run.turns[name], run.turns[run.baseline])
        return interval(run.label, f"run_{at}", found, ratio=True)

    return Table(
        f"runs{place}",
        "Speedup, run by run: " + ", ".join(run.label for run in runs),
        "The same models, settings and kind of machine; every run over its own baseline.",
        [
            [
                method_cell(name, label),
                word("windows", "windows", windows),
                *(cell(at, run, name, windows) for at, run in enumerate(runs, 1)),
            ]
            for (name, windows), label in labels.items()
        ],
    )


def larger_targets(runs: Sequence[Saved]) -> Table:
    """Table 3: EAGLE-2 and the longer chains by target, the smallest first, beside the paper's."""

    found: list[tuple[str, int | None, str, float | None, str, _Compared]] = []
    for run in sorted(runs, key=lambda one: one.target["parameters"]):
        about = (run.target_name, run.target["parameters"], run.label, run.temperature)
        for name, method in run.methods.items():
            if method["kind"] == "eagle" or len(method["levels"]) > 2:
                found.append((*about, method["label"], _compared(run, name, printed.OVERALL)))
    seen = {printed.target_of(run.target) for run in runs}
    for target in printed.LARGER:
        for system in (printed.EAGLE_2, printed.POLYBASIC) if target not in seen else ():
            paper = printed.SPEEDUPS[target, system][printed.OVERALL]
            found.append((target, None, "paper", None, system, _Compared(None, None, 0, paper)))
    return Table(
        "table3",
        "By target (Table 3)",
        "Each over the baseline of its own run.",
        [
            [
                word("target", "target", target),
                number("parameters, millions", "parameters", size, 0, 1e-6),
                word("run", "run", label),
                number("temperature", "temperature", temperature, 1),
                word("method", "label", method),
                *compared.cells(),
            ]
            for target, size, label, temperature, method, compared in found
        ],
    )


def as_printed() -> Table:
    """Tables 2 and 3 as the paper has them."""

    def cell(task: str, result: printed.Result | None) -> Cell:
        speedup, length = result or (None, None)
        values = {f"{task}_speedup": speedup, f"{task}_length": length}
        text = "-" if result is None else f"{speedup:.2f} / {length:.2f}"
        return Cell(values, printed.TASK_NAMES[task], text)

    return Table(
        "printed",
        "What the papers print",
        "Speedup / mean accepted length on an A800, as printed. Known inconsistencies: "
        + " ".join(printed.INCONSISTENCIES),
        [
            [
                word("target", "target", target),
                word("system", "system", system),
                *(cell(task, results.get(task)) for task in (*TASKS, printed.OVERALL)),
            ]
            for (target, system), results in printed.SPEEDUPS.items()
        ],
    )
