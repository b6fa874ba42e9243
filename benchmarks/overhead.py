"""Time the host's share of a verification round, with instant levels.

A forward pass is a slice of logits. Time in passes and in the compiled operators is subtracted; the
rest is the loop, the bookkeeping and the tensors for the operators' arguments. A round is a
verification at any level, with the drafting before it.

Python calls of the package per round of the target are counted with `sys.setprofile`. A count does
not depend on the machine's load, unlike a time, so a test can check a budget. Calls within torch
and transformers are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch

import polyspec_ext as ps
from benchmarks import measuring, output
from polyspec_ext import progress, tiny
from polyspec_ext.cli import options
from polyspec_ext.drafters.trees import DynamicTree
from polyspec_ext.ops import verification

PER_TURN = 10  # calls of ``advance`` of a case per turn
VOCAB = 2048  # as the shipped models
SPREAD = 0.3  # of the logits: flat distributions, so that five of six draft tokens are accepted
MANY = 1 << 40  # more new tokens than any run
COUNTED, UNCOUNTED = 8, 4  # rounds with counted Python calls, and rounds before
_ROOT = os.path.join(os.path.dirname(ps.__file__), "")
Meters = dict[str, float]  # subtracted seconds: of forward passes, and of compiled operators


def metered(meters: Meters, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call to add its seconds to `meters[kind]`."""

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            meters[kind] += time.perf_counter() - began

    return timed


class InstantLevel:
    """A level without a model: a pass returns the next of R rows of logits ``[B, R, V]``, in turns,
    in any batch size."""

    supports_batches = True

    def __init__(self, name: str, rows: torch.Tensor) -> None:
        self.name, self._rows, self._next = name, rows, 0
        self.vocab_size, self.device = rows.shape[2], rows.device

    def prefill(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        self._next = 0

    def forward(self, tokens: torch.Tensor, keep: int, *_: Any, **__: Any) -> torch.Tensor:
        start = self._next if self._next + keep <= self._rows.shape[1] else 0
        self._next = start + 1
        return self._rows[:, start : start + keep]

    def rollback(self, lengths: Sequence[int]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._rows = self._rows[list(rows)]


class Case:
    """A running batch of a chain with `levels` levels and the default windows."""

    def __init__(self, levels: int, batch: int, meters: Meters) -> None:
        self.levels, self.batch, self.meters = levels, batch, meters
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of counted rounds, by kind
        self.rounds, self.counts = 0, False  # counted rounds, and whether more are counted
        window = [4 * 2**i for i in reversed(range(levels - 1))]
        random, models = torch.Generator().manual_seed(levels), []
        for name in (f"level {i + 1}" for i in range(levels)):
            logits = torch.randn(batch, max(window) + 64, VOCAB, generator=random) * SPREAD
            level: Any = InstantLevel(name, logits)
            level.forward = metered(meters, "forwards", level.forward)
            models.append(level)
        self.chain = ps.Chain(models, window, graphs=False)
        prompts = [[1 + b] * (1 + b % 7) for b in range(batch)]
        self.running = self.chain.batch(prompts, MANY, temperature=1.0, seed=3, eos_token_id=[])

    def turn(self) -> None:
        """Call ``advance`` `PER_TURN` times; each ends with a verification by the target."""
        *verifying, _ = self.running.stats.levels
        for _ in range(PER_TURN):
            before = dict(self.meters)
            rounds = -sum(level.num_forward_passes for level in verifying)
            began = time.perf_counter()
            self.running.advance()
            total = time.perf_counter() - began
            rounds += sum(level.num_forward_passes for level in verifying)
            took = {kind: seconds - before[kind] for kind, seconds in self.meters.items()}
            took["ours"] = total - sum(took.values())
            for kind, seconds in took.items() if self.counts else ():
                self.seconds[kind].append(seconds / rounds)
            self.rounds += rounds * self.counts

    def report(self) -> dict[str, Any]:
        """Return the row of the JSON report."""
        *verifying, drafting = self.running.stats.levels
        passes = sum(level.num_forward_passes for level in verifying)
        return {
            "levels": self.levels,
            "batch": self.batch,
            "window": self.chain.window,
            "rounds": self.rounds,
            "drafter_passes_per_round": drafting.num_forward_passes / passes,
            "draft_acceptance_rate": [level.draft_acceptance_rate for level in verifying],
            **{
                f"{kind}_us": measuring.quartiles(1e6 * np.asarray(spent))
                for kind, spent in self.seconds.items()
            },
        }


def measure(levels: Sequence[int], batches: Sequence[int], turns: int) -> list[Case]:
    """Measure all cases in turns."""
    meters = dict.fromkeys(("forwards", "operators"), 0.0)
    cases = [Case(n, b, meters) for n in levels for b in batches]
    compiled: dict[str, Any] = {
        name: metered(meters, "operators", getattr(verification, name))
        for name in ("_draw", "_verify")
    }
    timed = [measuring.Contender(f"{case.levels} levels", case.turn) for case in cases]

    def load(turn: int) -> None:
        for case in cases:
            case.counts = turn >= 0

    calls = measuring.turns(timed, turns, measuring.Clock("cpu"), load, 1)
    bar = progress.bar(calls, total=turns * len(cases), desc="overhead", leave=False)
    with mock.patch.multiple(verification, **compiled):
        for _ in measuring.required(bar):
            pass
    return cases


def counted(call: Callable[[], object]) -> Counter[str]:
    """Count calls of the package's functions while `call` runs, by file below the package.
    Generators and comprehensions with a frame count at each entry."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_ROOT):
            counts[file[len(_ROOT) :]] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return counts


# By name: levels, packed or not (on any processor), number of prompts, temperature.
CALLS: dict[str, tuple[tuple[str, ...], bool, int, float]] = {
    "plain decoding": (("target",), False, 1, 1.0),
    "plain decoding, packed": (("target",), True, 1, 1.0),
    "three levels": (tiny.LEVELS, False, 1, 1.0),
    "three levels, packed": (tiny.LEVELS, True, 1, 1.0),
    "three levels, 8 prompts": (tiny.LEVELS, False, 8, 1.0),
    "EAGLE tree": (("target", "eagle3"), False, 1, 0.0),
}


def calls_of(name: str) -> dict[str, Any]:
    """Return the median number of calls per round of a case, and the number of files in a median
    round."""
    (first, *below), pack, rows, temperature = CALLS[name]
    head = below == ["eagle3"]
    models = [first] if head else [first, *below]
    levels: list[Any] = [*tiny.levels(models, dtype=torch.float32, pack=pack).values()]
    if head:
        levels.append(ps.Eagle.from_pretrained(tiny.path(*below), levels[0], tree=DynamicTree()))
    prompts = [list(range(1, 9 + row)) for row in range(rows)]
    chain = ps.Chain(levels, [5, 3][: len(below)])
    batch = chain.batch(prompts, 400, temperature=temperature, seed=3, eos_token_id=[])
    for _ in range(UNCOUNTED):
        batch.advance()
    rounds = sorted((counted(batch.advance) for _ in range(COUNTED)), key=Counter.total)
    calls = statistics.median_high(counter.total() for counter in rounds)
    return {"name": name, "calls": calls, "files": len(rounds[COUNTED // 2])}


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases; return the JSON report."""
    return {
        **output.header("overhead", 4),
        "settings": {"turns": args.turns, "temperature": 1.0, "vocab": VOCAB},
        "cases": [case.report() for case in measure(args.levels, args.batch, args.turns)],
        "calls": [calls_of(name) for name in CALLS],
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    rows = []
    for row in report["cases"]:
        ours, operators = row["ours_us"], row["operators_us"]
        rows.append(
            [
                *(str(row["levels"]), ",".join(map(str, row["window"])), str(row["batch"])),
                *(f"{ours['median']:.0f}", f"{ours['q25']:.0f} to {ours['q75']:.0f}"),
                *(f"{operators['median']:.0f}", f"{row['drafter_passes_per_round']:.1f}"),
            ]
        )
    heads = ["levels", "window", "batch", "ours", "quartiles", "operators", "passes"]
    lines = [
        "# Overhead of the chain",
        "",
        f"{report['machine']['device_name']}, {output.conditions(report)}.",
        "",
        "Microseconds of host time per verification round, at any level, with the drafting before "
        "it. Ours: outside forward passes and compiled operators. Passes: of the drafter.",
        "",
        *output.table(heads, rows),
    ]
    cells = ([row["name"], str(row["calls"]), str(row["files"])] for row in report["calls"])
    heads = ["Python calls per round of the target", "calls", "files"]
    return "\n".join([*lines, "", *output.table(heads, cells)])


OPTIONS = (
    ("--levels", options.listed(options.integer(2)), [2, 3, 4], "N,...", ""),
    ("--batch", options.COUNTS, [1, 8, 32], "B,...", ""),
    ("--turns", options.COUNT, 20, "N", ""),
)
