"""The targets: what the measured cases must reach.

CPU: batch 1, K = 10, V = 128256, fp32, acceptance .7. A ratio target is met when the median of
the turns' ratios and the ratio of the means both reach it: at batch 1 the token rule stops early
in more than half of the turns, so a median alone would flatter it. CUDA (H200, cold L2, bf16):
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from polyspec_ext.bench import peers
from polyspec_ext.bench.grid import CUT, Filters

MICROSECONDS = {1: 8.0, 8: 10.0, 64: 30.0, 256: 100.0}  # by batch
Result = dict[str, Any]  # one case of the report


@dataclass(frozen=True)
class Target:
    """Text, the measured value as text, and whether it is met (None: not measured in this run)."""

    text: str
    measured: str
    met: bool | None


def _is(case: Result, operator: str, filters: Filters, batch: int, **axes: Any) -> bool:
    wanted: dict[str, Any] = {
        "operator": operator,
        "vocab": 128256,
        "batch": batch,
        "filters": str(filters),
    }
    if operator != "sample":
        wanted.update(draft_len=10, acceptance_asked=0.7)
    wanted.update(axes)
    return all(case[name] == value for name, value in wanted.items())


def _find(
    cases: list[Result], operator: str, filters: Filters, batch: int, dtype: str
) -> Result | None:
    found = (case for case in cases if _is(case, operator, filters, batch, dtype=dtype))
    return next(found, None)


def _row(case: Result | None, name: str) -> Result | None:
    rows = case["rows"] if case is not None else []
    return next((row for row in rows if row["name"] == name), None)


def _faster(text: str, wanted: float, case: Result | None, peer: str) -> Target:
    row = _row(case, peer)
    if row is None:
        return Target(text, "not measured", None)
    r = row["ratio"]
    measured = (
        f"{r['median']:.2f}x (95 %: {r['low']:.2f} to {r['high']:.2f}), means {r['of_means']:.2f}x"
    )
    return Target(text, measured, min(r["median"], r["of_means"]) >= wanted)


def _limit(text: str, measure: Callable[[Result], float], wanted: float, row: Result | None,
           at_least: bool = False) -> Target:  # fmt: skip
    if row is None:
        return Target(text, "not measured", None)
    value = measure(row)
    return Target(text, f"{value:.1f}", value >= wanted if at_least else value <= wanted)


def check(cases: list[Result], device: str, *, busy: bool = False) -> list[Target]:
    """The targets of a device against the cases of a report. On a `busy` machine what
    was measured is told, but nothing is called met or missed."""
    found = list(_cuda(cases) if device == "cuda" else _cpu(cases))
    return [replace(target, met=None) for target in found] if busy else found


def _cpu(cases: list[Result]) -> Iterator[Target]:
    verify = _find(cases, "verify-token", Filters(), 1, "float32")
    cut = _find(cases, "sample", CUT, 1, "float32")
    yield _faster(f"at least 8x faster than {peers.TRANSFORMERS}", 8, verify, peers.TRANSFORMERS)
    yield _faster(f"no slower than {peers.LOGSUMEXP}", 1, verify, peers.LOGSUMEXP)
    yield _faster(f"at least 3x faster than {peers.VLLM}", 3, verify, peers.VLLM)
    for peer in (peers.SORT, peers.WARPERS):
        yield _faster(f"sample, {CUT}: at least 10x faster than {peer}", 10, cut, peer)


def _cuda(cases: list[Result]) -> Iterator[Target]:
    def median(row: Result) -> float:
        return float(row["median_us"])

    for batch, limit in MICROSECONDS.items():
        plain = _find(cases, "verify-token", Filters(), batch, "bfloat16")
        cut = _find(cases, "verify-token", CUT, batch, "bfloat16")
        text = f"verify-token, batch {batch}: at most {limit:g} us"
        yield _limit(text, median, limit, _row(plain, "polyspec"))
        both = f"verify-token, batch {batch}, {CUT}: at most 2x"
        ours, base = _row(cut, "polyspec"), _row(plain, "polyspec")
        if ours is None or base is None:
            yield Target(both, "not measured", None)
        else:
            times = median(ours) / median(base)
            yield Target(both, f"{times:.2f}x", times <= 2)
        for peer in (peers.FLASHINFER, peers.TRANSFORMERS, peers.EAGER, peers.COMPILED):
            text = f"verify-token, batch {batch}: at least 3x faster than {peer}"
            yield _faster(text, 3, plain, peer)
    sample = _row(_find(cases, "sample", Filters(), 256, "bfloat16"), "polyspec")
    text = "sample, batch 256: at least 80 % of the copy bandwidth"
    yield _limit(text, lambda row: float(row["percent_of_copy"]), 80, sample, at_least=True)
