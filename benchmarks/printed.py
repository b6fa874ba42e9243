"""The numbers that the papers print, as data for comparison with measurements.

Wang et al., *Polybasic Speculative Decoding Through a Theoretical Perspective* (ICML 2025), its
tables and its authors' replies to reviewers; Liu, Park and Shen, *A Drop-In Solution for On-the-Fly
Adaptation of Speculative Decoding in LLMs* (ACL 2025). Spec-Bench, batch 1, A800 80G and A100.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .questions import OTHER, TASKS

OVERALL = "overall"
TASK_NAMES = {
    "mt_bench": "MT-bench",
    "translation": "Translation",
    "summarization": "Summarisation",
    "qa": "QA",
    "math": "Math",
    "rag": "RAG",
    OTHER: "Other",
    OVERALL: "Overall",
}
POLYBASIC, FOUR_LEVELS, EAGLE_2 = "polybasic", "four levels", "EAGLE-2"


class Result(NamedTuple):
    """Speedup over plain decoding, and mean accepted tokens per pass of the target, if printed."""

    paper_speedup: float | None = None
    paper_length: float | None = None


# Targets, systems, and speedup / length by task and over all. By task: Table 2; over all: Figure 2,
# Table 3 and the replies to reviewers.
_SPEEDUPS = """
Vicuna-7B  polybasic  3.77/11.22 3.07/7.76 3.01/10.24 3.65/9.53 4.43/10.28 2.98/10.30 3.48/9.88
LLaMA3-8B  polybasic  3.70/9.97 3.39/8.86 3.02/9.38 3.16/9.08 3.87/10.08 2.71/9.24 3.31/9.44
LLaMA2-7B  polybasic  4.10/10.47 3.46/9.15 3.41/9.86 3.61/9.49 4.02/9.99 3.31/10.08 3.66/9.84
Qwen2-7B  polybasic  3.65/9.85 3.15/8.65 2.95/9.15 3.25/8.95 3.85/9.95 2.85/9.35 3.28/9.32
Vicuna-7B  EAGLE-2  3.19/4.76 2.07/3.22 2.59/3.96 2.45/3.71 3.19/4.72 2.15/3.95 2.61/4.34
LLaMA3-8B  EAGLE-2  2.69/3.99 2.37/3.53 2.23/3.58 2.21/3.42 2.83/4.20 2.23/3.95 2.44/3.82
LLaMA2-7B  EAGLE-2  3.04/4.48 2.61/3.96 2.50/4.04 2.55/4.05 3.04/4.68 2.40/4.19 2.70/4.30
Qwen2-7B  EAGLE-2  2.40/3.74 1.45/2.45 1.59/3.06 1.81/2.91 2.63/4.26 1.72/3.27 1.94/3.51
Vicuna-13B  polybasic  2.69/8.62
Vicuna-13B  EAGLE-2  2.30/4.42
LLaMA2-70B  polybasic  2.92/7.48
LLaMA2-70B  EAGLE-2  2.46/4.08
LLaMA2-7B  four levels  3.75/9.80
Vicuna-7B  Hydra  2.30/4.42
"""


def _by_task(text: str) -> dict[str, Result]:
    cells = [Result(*map(float, pair.split("/"))) for pair in text.split()]
    return dict(zip((*TASKS, OVERALL)[-len(cells) :], cells, strict=True))


SPEEDUPS = {
    (target, system): _by_task(text)
    for target, system, text in (line.split("  ") for line in _SPEEDUPS.strip().splitlines())
}
LARGER = ("Vicuna-13B", "LLaMA2-70B")  # Table 3


class Insertion(NamedTuple):
    """A row of Table 1: M_new between M_i and M_{i+1}; times in ms, speedups as measured."""

    case: str
    t_i: float
    length_of_new: float  # L_{i-new}
    t_new: float
    new_length: float  # L_new
    t_below: float  # T_{i+1}
    length: float  # L_i
    before: float | None
    after: float | None


INSERTIONS = (
    Insertion("Vicuna-7B, Vicuna-1B above EAGLE", 22, 3.83, 17.61, 3.77, 4, 4.34, 2.61, 1.08),
    Insertion("Vicuna-7B, its W4 copy above EAGLE", 22, 6.26, 7.00, 4.67, 4, 4.34, 2.61, 3.48),
    Insertion("FLAN-T5 XXL, base above small", 47.52, 3.50, 19.16, 3.02, 12.42, 2.28, 3.19, 3.88),
)
# Figure 4: usual range of the variance of the acceptance length per query, over 50 queries.
VARIANCES = {"sampled": (5.0, 50.0), "greedy": (15.0, 60.0)}

# The adaptation paper; gains over speculation with the best fixed window.
WINDOW_GAIN, WINDOW_SPEEDUP = 0.0769, 2.07
EAGLE_GAINS = {"Vicuna-7B": 0.0707, "LLaMA2-7B": 0.0337, "Vicuna-13B": 0.0255}  # MT-bench

INCONSISTENCIES = (
    "Table 1 has 6.26 for L_{i-new} of the system that Table 2 gives 9.88 tokens per pass.",
    "Lemma 3.1, with beta fitted to EAGLE-2's 2.61x, predicts about 2.7x for it, not 3.48x.",
    "The first bound of Table 1 is printed as -0.117; the formula gives -0.116.",
    "The FLAN-T5 speedups are standardised by size and are no ratios of wall time.",
    "The 22 ms of the baseline's pass are overhead: the memory of that card allows about 7 ms. On "
    "a faster runtime T_new/T_i is larger, and condition (1) harder to meet.",
    "The chain of target and W4 copy without the drafter, the control of Table 1, is not printed.",
    "Draft lengths, thresholds, temperature and trees are not stated.",
)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def target_of(model: Mapping[str, Any]) -> str | None:
    """Return the paper's name of a model, by its path, id or name, or None."""
    name = str(model.get("place") or model["name"]).rstrip("/").rpartition("/")[2]
    plain = _letters(name).removeprefix("meta")
    return next((target for target, _ in SPEEDUPS if plain.startswith(_letters(target))), None)


def system_of(method: Mapping[str, Any]) -> str | None:
    """Return the papers' system that equals a method of ``run.json``, or None."""
    if method["kind"] not in ("chain", "eagle"):
        return None
    _, *middle, last = (str(name).lower() for name in method["levels"])
    if _letters(last) not in ("eagle", "eagle2") or not method.get("tree"):
        return None
    if not middle:
        return EAGLE_2
    with_copy = any("w4" in name for name in middle)
    return {1: POLYBASIC, 2: FOUR_LEVELS}.get(len(middle)) if with_copy else None


def speedup_of(model: Mapping[str, Any], method: Mapping[str, Any], task: str) -> Result:
    """Return the papers' result for a model, a method and a task."""
    by_task = SPEEDUPS.get((target_of(model) or "", system_of(method) or ""), {})
    return by_task.get(task, Result())
