"""The targets: what the measured cases must reach.

CPU: batch 1, K = 10, V = 128256, fp32, acceptance .7. A ratio target is met when the median of
the turns' ratios and the ratio of the means both reach it: at batch 1 the token rule stops early
in more than half of the turns, so a median alone would flatter it. CUDA (H200, cold L2, bf16):
microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import peers
from benchmarks.grid import CUT, Filters

MICROSECONDS = {1: 8.0, 8: 10.0, 64: 30.0, 256: 100.0}  # by batch
Result = dict[str, Any]  # one case of the report


@dataclass(frozen=True)
class Target:
    """Text, the measured value as text, and whether it is met (None: not measured in this run)."""

    text: str
    measured: str
    met: bool | None


def _row(
    cases: list[Result], operator: str, filters: Filters, batch: int, dtype: str, name: str
) -> Result | None:
    """What a contender's row says of a case."""
    wanted: dict[str, Any] = {
        "operator": operator,
        "vocab": 128256,
        "batch": batch,
        "filters": str(filters),
        "dtype": dtype,
    }
    if operator != "sample":
        wanted.update(draft_len=10, acceptance_asked=0.7)
    found = (case["rows"] for case in cases if wanted.items() <= case.items())
    return next((row for row in next(found, []) if row["name"] == name), None)


def _faster(text: str, wanted: float, row: Result | None) -> Target:
    if row is None:
        return Target(text, "not measured", None)
    r = row["ratio"]
    measured = (
        f"{r['median']:.2f}x (95 %: {r['low']:.2f} to {r['high']:.2f}), means {r['of_means']:.2f}x"
    )
    return Target(text, measured, min(r["median"], r["of_means"]) >= wanted)


def check(cases: list[Result], device: str, *, busy: bool = False) -> list[Target]:
    """The targets of a device against the cases of a report. On a `busy` machine what
    was measured is told, but nothing is called met or missed."""
    found = list(_cuda(cases) if device == "cuda" else _cpu(cases))
    return [replace(target, met=None) for target in found] if busy else found


def _cpu(cases: list[Result]) -> Iterator[Target]:
    for text, wanted, operator, filters, peer in (
        ("at least 8x faster than", 8, "verify-token", Filters(), peers.TRANSFORMERS),
        ("no slower than", 1, "verify-token", Filters(), peers.LOGSUMEXP),
        ("at least 3x faster than", 3, "verify-token", Filters(), peers.VLLM),
        (f"sample, {CUT}: at least 10x faster than", 10, "sample", CUT, peers.SORT),
        (f"sample, {CUT}: at least 10x faster than", 10, "sample", CUT, peers.WARPERS),
    ):
        row = _row(cases, operator, filters, 1, "float32", peer)
        yield _faster(f"{text} {peer}", wanted, row)


def _cuda(cases: list[Result]) -> Iterator[Target]:
    for batch, limit in MICROSECONDS.items():
        verify = f"verify-token, batch {batch}"
        plain, cut = (
            _row(cases, "verify-token", filters, batch, "bfloat16", "polyspec")
            for filters in (Filters(), CUT)
        )
        median = None if plain is None else plain["median_us"]
        text = f"{verify}: at most {limit:g} us"
        yield _bounded(text, median, "{:.1f}", most=limit)
        times = None if plain is None or cut is None else cut["median_us"] / median
        yield _bounded(f"{verify}, {CUT}: at most 2x", times, "{:.2f}x", most=2)
        for peer in (peers.FLASHINFER, peers.TRANSFORMERS, peers.EAGER, peers.COMPILED):
            row = _row(cases, "verify-token", Filters(), batch, "bfloat16", peer)
            yield _faster(f"{verify}: at least 3x faster than {peer}", 3, row)
    sample = _row(cases, "sample", Filters(), 256, "bfloat16", "polyspec")
    share = None if sample is None else sample["percent_of_copy"]
    text = "sample, batch 256: at least 80 % of the copy bandwidth"
    yield _bounded(text, share, "{:.1f}", least=80)


def _bounded(
    text: str, value: float | None, form: str, least: float = 0.0, most: float = math.inf
) -> Target:
    if value is None:
        return Target(text, "not measured", None)
    return Target(text, form.format(value), least <= value <= most)
