"""What several tables say of a method: its speedup and mean accepted length, and its windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import printed, statistics
from ..saved import Saved
from ..statistics import Interval

TASK_NAMES = {
    "mt_bench": "MT-bench",
    "translation": "Translation",
    "summarization": "Summarisation",
    "qa": "QA",
    "math": "Math",
    "rag": "RAG",
    printed.OVERALL: "Overall",
}


def task_name(task: str) -> str:
    """As the papers have it."""
    return TASK_NAMES.get(task, task)


def spread(key: str, value: Interval | None) -> dict[str, Any]:
    """A value and its interval as entries of a record (`form.interval` shows them)."""
    if value is None:
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    return {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}


def compared(run: Saved, name: str, task: str) -> dict[str, Any]:
    """A method's speedup and mean accepted length in a task, over the turns that neither it nor
    the baseline failed, and what the paper prints."""
    ours, theirs = run.of_task(name, task), run.of_task(run.baseline, task)
    keys = statistics.same_turns(ours, theirs)
    paper = printed.cell_of(
        printed.target_of(run.target), printed.system_of(run.methods[name]), task
    )
    return {
        **spread("speedup", statistics.speedup(ours, theirs, keys)),
        "paper_speedup": None if paper is None else paper.speedup,
        **spread("length", statistics.pooled_length(ours, keys)),
        "paper_length": None if paper is None else paper.length,
        "turns": len(keys),
    }


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
