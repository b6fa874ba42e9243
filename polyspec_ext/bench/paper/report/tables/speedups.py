"""Speedups: over all tasks, by task, by run and by target (Tables 2 and 3, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import printed, statistics
from ..form import NONE, Column, Record, Table, below_one, beside, interval, number, word
from ..saved import Saved
from .compared import compared, spread, task_name, windows_of


def _best_two_levels(run: Saved) -> str | None:
    """The fastest of the methods of two levels in this engine."""
    found = {}
    for name, method in run.methods.items():
        if len(method["levels"]) == 2 and method["kind"] not in ("assisted", "engine"):
            value = statistics.speedup(run.turns[name], run.turns[run.baseline])
            if value is not None:
                found[name] = value.value
    return max(found, key=lambda name: found[name]) if found else None


def lossless(run: Saved, name: str) -> dict[str, Any]:
    """What the losslessness column is made of; None where it does not apply."""
    found: dict[str, Any] = dict.fromkeys(
        ("identical", "tied", "other", "gap", "unknown", "z", "p_value", "texts")
    )
    if name == run.baseline and run.sampling == "greedy":
        return found
    turns = run.turns[name]
    if run.sampling == "greedy":
        dtype = str(run.target.get("dtype", "")).removeprefix("torch.")
        found |= statistics.greedy_texts(turns, dtype)._asdict()
    else:
        sampled = statistics.sampled_texts(turns)
        if sampled is not None:
            found |= sampled._asdict()
    return found


def _lossless_text(record: Record) -> str:
    if record["z"] is not None:
        return f"p = {record['p_value']:.2g} (z {record['z']:+.1f}, {record['texts']} texts)"
    if record["identical"] is None:
        return NONE
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
    records = []
    for name, method in run.methods.items():
        over_two = None
        if two is not None and len(method["levels"]) > 2:
            over_two = statistics.speedup(run.turns[name], run.turns[two])
        records.append(
            {
                "method": name,
                "label": method["label"],
                "kind": method["kind"],
                "levels": " <- ".join(method["levels"]),
                "windows": windows_of(method),
                "tokens_per_second": statistics.rate(run.turns[name]),
                **compared(run, name, printed.OVERALL),
                **spread("over_two_levels", over_two),
                "failed": len(run.failed[name]),
                **lossless(run, name),
            }
        )
    losing = sum(record["speedup"] is not None and record["speedup"] < 1 for record in records)
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
            else "p-value of the texts' likelihood being as far from its mean under the target."
        )
        + f"{best} Slower than the baseline: {losing} of {len(records) - 1}.",
        [
            Column("method", word("label"), words=True),
            Column("windows", word("windows"), words=True),
            Column("tokens/s", number("tokens_per_second", 1)),
            Column("speedup", beside(interval("speedup"), "paper_speedup"),
                   loses=below_one("speedup")),
            Column("over best two levels", interval("over_two_levels"),
                   loses=below_one("over_two_levels")),
            Column("mean accepted", beside(interval("length"), "paper_length")),
            Column("turns", number("turns", 0)),
            Column("failed", number("failed", 0)),
            Column("lossless", _lossless_text, words=True),
        ],
        records,
    )  # fmt: skip


def by_task(run: Saved) -> Table:
    """Table 2: speedup and mean accepted length per task and overall."""
    tasks = [*run.tasks, printed.OVERALL]
    records = []
    for name, method in run.methods.items():
        record: dict[str, Any] = {"method": name, "label": method["label"]}
        for task in tasks:
            found = compared(run, name, task)
            record |= {f"{task}_{key}": value for key, value in found.items()}
        records.append(record)

    def column(task: str) -> Column:
        speed, length = f"{task}_speedup", f"{task}_length"
        paper = number(f"{task}_paper_speedup"), number(f"{task}_paper_length")

        def text(record: Record) -> str:
            shown = f"{interval(speed)(record)} / {number(length)(record)}"
            if record[f"{task}_paper_speedup"] is None:
                return shown
            return f"{shown} (paper {paper[0](record)} / {paper[1](record)})"

        return Column(task_name(task), text, loses=below_one(speed))

    return Table(
        "table2",
        "Speedup / mean accepted length by task (Table 2)",
        "As above, for each task by itself.",
        [Column("method", word("label"), words=True), *(column(task) for task in tasks)],
        records,
    )


def side_by_side(runs: Sequence[Saved], place: int) -> Table:
    """Runs of the same models and settings: the overall speedup of each."""
    names = dict.fromkeys(
        (name, windows_of(method)) for run in runs for name, method in run.methods.items()
    )
    records = []
    for name, windows in names:
        own = [
            run if name in run.methods and windows_of(run.methods[name]) == windows else None
            for run in runs
        ]
        label = next(run.methods[name]["label"] for run in own if run is not None)
        record: dict[str, Any] = {"method": name, "label": label, "windows": windows}
        for number_of, run in enumerate(own, 1):
            found = None
            if run is not None:
                found = statistics.speedup(run.turns[name], run.turns[run.baseline])
            record |= spread(f"run_{number_of}", found)
        records.append(record)
    return Table(
        f"runs{place}",
        "Speedup, run by run: " + ", ".join(run.label for run in runs),
        "The same models, settings and kind of machine; every run over its own baseline.",
        [
            Column("method", word("label"), words=True),
            Column("windows", word("windows"), words=True),
            *(
                Column(run.label, interval(f"run_{at}"), loses=below_one(f"run_{at}"))
                for at, run in enumerate(runs, 1)
            ),
        ],
        records,
    )


def larger_targets(runs: Sequence[Saved]) -> Table:
    """Table 3: EAGLE-2 and the longer chains by target, the smallest first, beside the paper's."""
    records = []
    for run in sorted(runs, key=lambda one: float(one.target.get("parameters") or 0)):
        for name, method in run.methods.items():
            if method["kind"] == "eagle" or len(method["levels"]) > 2:
                records.append(
                    {
                        "run": run.label,
                        "target": run.target_name,
                        "parameters": run.target.get("parameters"),
                        "temperature": run.temperature,
                        "label": method["label"],
                        **compared(run, name, printed.OVERALL),
                    }
                )
    seen = {printed.target_of(run.target) for run in runs}
    for target in printed.LARGER:
        for system in (printed.EAGLE_2, printed.POLYBASIC) if target not in seen else ():
            paper = printed.SPEEDUPS[target, system][printed.OVERALL]
            records.append(
                {
                    "run": "paper",
                    "target": target,
                    "parameters": None,
                    "temperature": None,
                    "label": system,
                    **spread("speedup", None),
                    "paper_speedup": paper.speedup,
                    **spread("length", None),
                    "paper_length": paper.length,
                    "turns": 0,
                }
            )
    return Table(
        "table3",
        "By target (Table 3)",
        "Each over the baseline of its own run.",
        [
            Column("target", word("target"), words=True),
            Column("parameters, millions", number("parameters", 0, 1e-6)),
            Column("run", word("run"), words=True),
            Column("temperature", number("temperature", 1)),
            Column("method", word("label"), words=True),
            Column("speedup", beside(interval("speedup"), "paper_speedup"),
                   loses=below_one("speedup")),
            Column("mean accepted", beside(interval("length"), "paper_length")),
            Column("turns", number("turns", 0)),
        ],
        records,
    )  # fmt: skip
