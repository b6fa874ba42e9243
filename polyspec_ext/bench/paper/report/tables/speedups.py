"""Speedups: over all tasks, by task, by run and by target (Tables 2 and 3, Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyspec_ext.bench import output

from ...questions import TASKS
from .. import printed, statistics
from ..form import Column, Record, Table, number, shown_number, spread, word
from ..saved import Saved

_LOSSLESS = ("identical", "tied", "other", "gap", "unknown", "z", "p_value", "texts")


def windows_of(method: Mapping[str, Any]) -> str:
    """Of a method, in words: its windows, tail, tree and policy."""
    parts = []
    if method.get("windows"):
        parts.append(", ".join(map(str, method["windows"])))
    if method.get("tail"):
        parts.append(f"tail {method['tail']}")
    if method.get("tree"):
        parts.append("tree " + ", ".join(f"{k} {v}" for k, v in method["tree"].items()))
    if method.get("policy"):
        parts.append(str(method["policy"]))
    return "; ".join(parts)


def _compared(run: Saved, name: str, task: str) -> dict[str, Any]:
    """A method's speedup and mean accepted length in a task, over the turns that neither it nor
    the baseline failed, and what the paper prints."""
    ours, theirs = run.of_task(name, task), run.of_task(run.baseline, task)
    keys = statistics.same_turns(ours, theirs)
    target, system = printed.target_of(run.target), printed.system_of(run.methods[name])
    paper = printed.SPEEDUPS.get((target or "", system or ""), {}).get(task)
    return {
        **spread("speedup", statistics.speedup(ours, theirs)),
        "paper_speedup": None if paper is None else paper.speedup,
        **spread("length", statistics.pooled_length(ours, keys)),
        "paper_length": None if paper is None else paper.length,
        "turns": len(keys),
    }


def _best_two_levels(run: Saved) -> str | None:
    """The fastest of the methods of two levels in this engine."""
    found = {}
    for name, method in run.methods.items():
        if len(method["levels"]) == 2 and method["kind"] not in ("assisted", "engine"):
            value = statistics.speedup(run.turns[name], run.turns[run.baseline])
            if value is not None:
                found[name] = value.value
    return max(found, key=lambda name: found[name], default=None)


def _lossless(run: Saved, name: str) -> dict[str, Any]:
    """What the losslessness column is made of; None where it does not apply."""
    found: dict[str, Any] = dict.fromkeys(_LOSSLESS)
    if run.sampling == "sampled":
        return found | statistics.sampled_texts(run.turns[name])
    if name == run.baseline:
        return found
    return found | statistics.greedy_texts(run.turns[name], run.target["dtype"])


def _lossless_text(record: Record) -> str:
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
                **_compared(run, name, printed.OVERALL),
                **spread("over_two_levels", over_two),
                "failed": sum(turn.method == name for turn in run.failed),
                **_lossless(run, name),
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
            word("method", "label"),
            word("windows", "windows"),
            number("tokens/s", "tokens_per_second", 1),
            number("speedup", "speedup", ratio=True, paper="paper_speedup"),
            number("over best two levels", "over_two_levels", ratio=True),
            number("mean accepted", "length", paper="paper_length"),
            number("turns", "turns", 0),
            number("failed", "failed", 0),
            Column("lossless", _lossless_text, words=True),
        ],
        records,
    )


def by_task(run: Saved) -> Table:
    """Table 2: speedup and mean accepted length per task and overall."""
    tasks = [*run.tasks, printed.OVERALL]
    records = []
    for name, method in run.methods.items():
        record: dict[str, Any] = {"method": name, "label": method["label"]}
        for task in tasks:
            found = _compared(run, name, task)
            record |= {f"{task}_{key}": value for key, value in found.items()}
        records.append(record)

    def column(task: str) -> Column:
        def text(record: Record) -> str:
            length = output.number(record[f"{task}_length"], ".2f")
            shown = f"{shown_number(record, f'{task}_speedup')} / {length}"
            paper = record[f"{task}_paper_speedup"], record[f"{task}_paper_length"]
            return shown if paper[0] is None else f"{shown} (paper {paper[0]:.2f} / {paper[1]:.2f})"

        return Column(printed.task_name(task), text, ratio=f"{task}_speedup")

    return Table(
        "table2",
        "Speedup / mean accepted length by task (Table 2)",
        "As above, for each task by itself.",
        [word("method", "label"), *map(column, tasks)],
        records,
    )


def side_by_side(runs: Sequence[Saved], place: int) -> Table:
    """Runs of the same models and settings: the overall speedup of each."""
    records: dict[tuple[str, str], dict[str, Any]] = {}
    nothing = {key: None for at in range(1, len(runs) + 1) for key in spread(f"run_{at}", None)}
    for at, run in enumerate(runs, 1):
        for name, method in run.methods.items():
            about = {"method": name, "label": method["label"], "windows": windows_of(method)}
            record = records.setdefault((name, about["windows"]), {**about, **nothing})
            found = statistics.speedup(run.turns[name], run.turns[run.baseline])
            record |= spread(f"run_{at}", found)
    return Table(
        f"runs{place}",
        "Speedup, run by run: " + ", ".join(run.label for run in runs),
        "The same models, settings and kind of machine; every run over its own baseline.",
        [
            word("method", "label"),
            word("windows", "windows"),
            *(number(run.label, f"run_{at}", ratio=True) for at, run in enumerate(runs, 1)),
        ],
        list(records.values()),
    )


def larger_targets(runs: Sequence[Saved]) -> Table:
    """Table 3: EAGLE-2 and the longer chains by target, the smallest first, beside the paper's."""
    records = []
    for run in sorted(runs, key=lambda one: one.target["parameters"]):
        for name, method in run.methods.items():
            if method["kind"] == "eagle" or len(method["levels"]) > 2:
                records.append(
                    {
                        "run": run.label,
                        "target": run.target_name,
                        "parameters": run.target["parameters"],
                        "temperature": run.temperature,
                        "label": method["label"],
                        **_compared(run, name, printed.OVERALL),
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
            word("target", "target"),
            number("parameters, millions", "parameters", 0, 1e-6),
            word("run", "run"),
            number("temperature", "temperature", 1),
            word("method", "label"),
            number("speedup", "speedup", ratio=True, paper="paper_speedup"),
            number("mean accepted", "length", paper="paper_length"),
            number("turns", "turns", 0),
        ],
        records,
    )


def as_printed() -> Table:
    """Tables 2 and 3 as the paper has them."""
    tasks = (*TASKS, printed.OVERALL)
    records = [
        {"target": target, "system": system}
        | {
            f"{task}_{name}": getattr(cells.get(task), name, None)
            for task in tasks
            for name in printed.Cell._fields
        }
        for (target, system), cells in printed.SPEEDUPS.items()
    ]

    def column(task: str) -> Column:
        def text(record: Record) -> str:
            speedup, length = record[f"{task}_speedup"], record[f"{task}_length"]
            return "-" if speedup is None else f"{speedup:.2f} / {length:.2f}"

        return Column(printed.task_name(task), text)

    return Table(
        "printed",
        "What the papers print",
        "Speedup / mean accepted length on an A800, as printed. Known inconsistencies: "
        + " ".join(printed.INCONSISTENCIES),
        [word("target", "target"), word("system", "system"), *map(column, tasks)],
        records,
    )
