"""Estimate the gain of (target, W4, EAGLE) over (target, EAGLE) on a GPU from counted launches.

Launches are counted without a GPU, by tests (python_tests/levels/test_cuda_chains.py). A pass costs
its launches and the bytes of its weights. Nothing is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks import output
from benchmarks.shapes import SHAPES, Shape
from polyspec_ext.cli import options
from polyspec_ext.planning.theory import Acceptance, expectation
from polyspec_ext.runtime.plan import default_rounds


class Launches(NamedTuple):
    """Launches of the steps of the chain (target, 4-bit copy, EAGLE head) at batch 1."""

    layer: int  # of a decoder layer of the target
    copy_layer: int  # of a layer of its copy
    plain: int  # of a step of the target alone, beside its layers
    # Of a verification beside its layers: ends, rows, rule, and the states for the head.
    target: int
    copy: int
    draft: int  # of a draft of one token
    token: int  # of each further token


# Counted with attention over up to 512 slots. Without fused layers torch's attention is several
# operators for tensors without data, and 1 or 2 kernels on a device.
EAGER = Launches(52, 49, 43, 58, 83, 67, 50)
FUSED = Launches(9, 9, 36, 45, 70, 42, 25)

BF16, INT4 = 2.0, 0.5 + 4 / 128  # bytes of a weight; a scale and a zero for 128 of 4 bits
READ = 0.85  # share of the bandwidth, reached by bfloat16 products
GROWTH, INT4_GROWTH = 0.006, 0.01  # of reading the weights once, for each further token, up to 64
WINDOWS = range(1, 11)  # candidate windows of the head
OUTER = range(4, 37, 4)  # candidate windows of the target above the copy


class Way(NamedTuple):
    """Launches of a chain's steps; the 4-bit product's share of the bandwidth."""

    name: str
    launches: Launches
    share: float


WAYS = (
    Way("transformers' layers, 4-bit product at 55 %", EAGER, 0.55),
    Way("fused layers, 4-bit product at 55 %", FUSED, 0.55),
    Way("fused layers, 4-bit product at 80 %", FUSED, 0.80),
)


@dataclass(frozen=True)
class Seconds:
    """`planning.theory.PassSeconds` of a chain of `shape`: target, optional copy, head."""

    shape: Shape
    way: Way
    bandwidth: float  # bytes a second
    node: float  # seconds of a launch
    copy: bool

    def verify(self, level: int, pending: int) -> float:
        counts, layers = self.way.launches, self.shape.layers
        weights = layers * self.shape.layer_weights
        head = BF16 * self.shape.hidden * self.shape.vocab / (READ * self.bandwidth)
        if level == 1:
            nodes = layers * counts.layer + (counts.target if pending else counts.plain)
            read, growth = BF16 * weights / (READ * self.bandwidth), GROWTH
        else:
            nodes = layers * counts.copy_layer + counts.copy
            read, growth = INT4 * weights / (self.way.share * self.bandwidth), INT4_GROWTH
        return nodes * self.node + (read + head) * (1 + growth * pending)

    def draft(self, tokens: int) -> float:
        shape, counts = self.shape, self.way.launches
        weights = 2 * shape.hidden**2 + shape.layer_weights + shape.hidden * shape.vocab
        read = tokens * BF16 * weights / (READ * self.bandwidth)
        return read + self.node * (counts.draft + (tokens - 1) * counts.token)


def best(seconds: Seconds, acceptance: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Return the tokens per second of the fastest chain, and its windows."""
    tried = itertools.product(OUTER, WINDOWS) if seconds.copy else ((size,) for size in WINDOWS)
    accept = Acceptance.constant(*acceptance)

    def rate(windows: tuple[int, ...]) -> float:
        return expectation(windows, default_rounds(windows), accept, seconds).tokens_per_second

    return max((rate(windows), windows) for windows in tried)


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON report: the estimates and their inputs."""
    shape, rows = SHAPES[args.shape], []
    for way in WAYS:
        with_copy, alone = (
            Seconds(shape, way, 1e12 * args.bandwidth, 1e-6 * args.node, copy)
            for copy in (True, False)
        )
        plain = alone.verify(1, 0)
        head = alone.draft(2) - alone.draft(1)
        milliseconds = {"target": plain, "copy": with_copy.verify(2, 0), "head": head}
        row: dict[str, Any] = {"way": way.name, "launches": way.launches._asdict()}
        row["milliseconds"] = {name: 1e3 * seconds for name, seconds in milliseconds.items()}
        for name, chain, acceptance in (
            ("head", alone, [args.inner]), ("both", with_copy, [args.outer, args.inner])
        ):  # fmt: skip
            rate, windows = best(chain, acceptance)
            row[name] = {"times": rate * plain, "windows": list(windows)}
        rows.append(row)
    settings = {name: getattr(args, name) for name in ("outer", "inner", "bandwidth", "node")}
    return {"schema": 4, "estimate": True, "shape": asdict(shape), "settings": settings,
            "rows": rows}  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    settings, cells = report["settings"], []
    for row in report["rows"]:
        counts, times = row["launches"], row["milliseconds"]
        layers = f"{counts['layer']} / {counts['copy_layer']}"
        passes = " / ".join(f"{times[name]:.2f}" for name in ("target", "copy", "head"))
        chains = [
            f"{row[name]['times']:.2f} ({', '.join(map(str, row[name]['windows']))})"
            for name in ("head", "both")
        ]
        cells.append([row["way"], layers, passes, *chains])
    heads = [
        "passes", "launches a layer: target / W4", "ms: target / W4 / EAGLE token",
        "(target, EAGLE)", "(target, W4, EAGLE)",
    ]  # fmt: skip
    return "\n".join(
        [
            f"**Estimate, not measured**: times plain decoding by the same passes (best windows), "
            f"{report['shape']['name']} in bfloat16.",
            "",
            *output.table(heads, cells, range(1, 5)),
            "",
            f"Counted: launches. Assumed: acceptance {settings['outer']:g} of W4's tokens, "
            f"{settings['inner']:g} of EAGLE's; {settings['node']:g} us a launch in a graph; a "
            f"bandwidth of {settings['bandwidth']:g} TB/s, of which bfloat16 products reach "
            f"{READ:.0%}; {GROWTH:.1%} more for each further token of a pass, {INT4_GROWTH:.0%} in "
            "4 bits; attention costs its launches alone.",
        ]
    )


OPTIONS = (
    ("--outer", options.SHARE, 0.97, "A", "acceptance of W4's tokens"),
    ("--inner", options.SHARE, 0.8, "A", "acceptance of EAGLE's tokens"),
    ("--bandwidth", options.number(0.01), 3.0, "TB/S", "of the memory"),
    ("--node", options.number(0), 1.7, "US", "of a launch in a graph"),
    ("--shape", tuple(SHAPES), "llama2-7b", None, ""),
)
