"""``benchmarks overhead``: what the chain's own Python costs per verification round.

The levels are instant: their logits lie ready, so a forward pass is a slice. What is spent in them
and in the operators is timed and taken off; the rest is the loop, the scheduler, the bookkeeping
and the tensors that are made for the operators' arguments. A round is one verification, at whatever
level, with the drafting before it. Reading what came of it belongs to it; on a GPU that is also
where the host waits for the device, so copies between the two are told apart.

On CUDA the levels are small models and the rounds are replays of captured graphs. A round in which
a step was captured, or ran as it is, does not count.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import calls, machine, output, timing
from benchmarks.published_shapes import Shape
from benchmarks.random_models import random_model
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.ops import unchecked
from polyspec_ext.runtime.graphs import Graphs
from polyspec_ext.runtime.requirements import Operators

SCHEMA = 2  # of the JSON report
BUDGET = 150.0  # microseconds per round at batch 1
LEVELS, BATCHES = (2, 3, 4), (1, 8, 32)
TURNS, QUICK_TURNS = 20, 4
PER_TURN = 10  # calls of ``advance`` of a case, before the next case has its turn
VOCAB = 2048  # as the shipped models
SPREAD = 0.3  # of the logits: flat distributions, so that five of six draft tokens are accepted
MANY = 1 << 40  # more new tokens than any run makes
SMALL = Shape("small", 64, 128, 1, 2, 2, VOCAB)  # of a captured level


# Seconds of what is taken off, by kind: "functions" are the operators as a chain calls them, with
# the Python around their compiled part, "operators" that part alone.
METERS = ("forwards", "operators", "functions", "waiting")
Meters = dict[str, float]


def metered(meters: Meters, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, whose seconds are added to those of its kind."""
    clock = time.perf_counter

    def timed(*args: Any, **options: Any) -> Any:
        began = clock()
        try:
            return call(*args, **options)
        finally:
            meters[kind] += clock() - began

    return timed


class InstantLevel:
    """A level without a model: rows of logits that were made before, in any batch size.

    Args:
        name: for messages.
        rows: logits ``[B, R, V]``; a pass takes the next of the R rows, in turns.
    """

    supports_batches = True

    def __init__(self, name: str, rows: torch.Tensor) -> None:
        self.name, self._rows = name, rows
        self._next = 0
        self.vocab_size = rows.shape[2]
        self.device = rows.device

    def prefill(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        self._next = 0

    def forward(
        self,
        tokens: torch.Tensor,
        keep: int,
        counts: Sequence[int] | None = None,
        first: Sequence[int] | None = None,
    ) -> torch.Tensor:
        start = self._next
        if start + keep > self._rows.shape[1]:
            start = 0
        self._next = start + 1
        return self._rows[:, start : start + keep]

    def rollback(self, lengths: Sequence[int]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._rows = self._rows[list(rows)]


@dataclass
class Case:
    """One configuration and what its rounds took."""

    levels: int
    batch: int
    chain: ps.Chain
    running: Any  # its `Batch`
    # Per round, of every call of ``advance``, by what they were spent on.
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: int = 0


@contextmanager
def installed(meters: Meters, device: str) -> Iterator[None]:
    """The compiled part of the operators is timed while this lasts, and copies to and from a CUDA
    device."""
    with ExitStack() as stack:
        for name in ("_draw", "_verify"):
            stack.enter_context(_replaced(unchecked, name, meters, "operators"))
        if device == "cuda":
            for name in ("tolist", "cpu", "to"):
                stack.enter_context(_replaced(torch.Tensor, name, meters, "waiting"))
        yield


@contextmanager
def _replaced(owner: Any, name: str, meters: Meters, kind: str) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, metered(meters, kind, before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def make(
    levels: int,
    batch: int,
    device: str,
    temperature: float,
    meters: Meters,
    turns: int,
    graphs: Graphs | None = None,
) -> Case:
    """Return a chain of `levels` levels with the default windows, under way in a batch.

    Args:
        turns: how many calls of `turn` there will be.
        graphs: replays the steps; on CUDA the chain has its own. None on the CPU: instant levels.
    """
    window = [4 * 2**i for i in reversed(range(levels - 1))]
    prompts = [[1 + b] * (1 + b % 7) for b in range(batch)]
    made: list[Any]
    options: dict[str, Any]
    if device == "cuda" or graphs is not None:
        tokens = (turns + 1) * PER_TURN * (window[0] + 1)  # more than all rounds make
        made = _small_levels(levels, device, 64 + tokens)
        options = {"graphs": graphs, "sync_each_step": False}
    else:
        made, tokens = _instant_levels(levels, batch, max(window) + 64, device, meters), MANY
        operators = (metered(meters, "functions", f) for f in (unchecked.draw, unchecked.verify))
        options = {"graphs": False, "operators": Operators(*operators)}
    chain = ps.Chain(made, window, **options)
    running = chain.batch(prompts, tokens, temperature, seed=3, eos_token_id=[])
    return Case(levels, batch, chain, running)


def _instant_levels(
    count: int, batch: int, rows: int, device: str, meters: Meters
) -> list[InstantLevel]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for i in range(count):
        logits = torch.randn(batch, rows, VOCAB, generator=generator) * SPREAD
        level = InstantLevel(f"level {i + 1}", logits.to(device))
        forward = metered(meters, "forwards", level.forward)
        level.forward = forward  # type: ignore[method-assign]
        made.append(level)
    return made


def _small_levels(count: int, device: str, room: int) -> list[HuggingFaceLevel]:
    made = []
    for i in range(count):
        model = random_model(SMALL, torch.float32, device)
        model.config.max_position_embeddings = room
        made.append(HuggingFaceLevel(model, name=f"level {i + 1}"))
    return made


def turn(case: Case, meters: Meters) -> None:
    """Some calls of ``advance``, each of which ends with a verification by the target."""
    advance, clock = case.running.advance, time.perf_counter
    verifying, drafting = case.running.stats.levels[:-1], case.running.stats.levels[-1]
    graphs = case.chain.engine.graphs

    def steps() -> int:
        """Return how many steps no graph has replayed."""
        if graphs is None:
            return 0
        done = sum(level.num_verifications for level in verifying) + drafting.num_proposals
        return int(done) - graphs.num_replays

    for _ in range(PER_TURN):
        before, not_replayed = dict(meters), steps()
        passes = sum(level.num_forward_passes for level in verifying)
        began = clock()
        advance()
        total = clock() - began
        if steps() != not_replayed:
            continue
        rounds = sum(level.num_forward_passes for level in verifying) - passes
        took = {kind: meters[kind] - before[kind] for kind in METERS}
        spent = {
            "ours": total - took["forwards"] - took["operators"] - took["waiting"],
            "checks": took["functions"] - took["operators"],
            **{kind: took[kind] for kind in ("operators", "forwards", "waiting")},
        }
        for kind, seconds in spent.items():
            case.seconds[kind].append(seconds / rounds)
        case.rounds += rounds


def measure(
    levels: Sequence[int],
    batches: Sequence[int],
    device: str,
    turns: int,
    temperature: float,
    tick: Callable[[], object] = lambda: None,
    graphs: Graphs | None = None,
) -> list[Case]:
    """Measure all cases in turns, so that a change in the machine's load meets every one of them.

    Args:
        graphs: see `make`.
    """
    meters = dict.fromkeys(METERS, 0.0)
    cases = [
        make(n, b, device, temperature, meters, 1 + turns, graphs) for n in levels for b in batches
    ]
    with installed(meters, device):
        for case in cases:
            turn(case, meters)
            case.seconds.clear()
            case.rounds = 0
        for number in range(turns):
            for case in timing.rotated(cases, number):
                turn(case, meters)
                tick()
    return cases


def _row(case: Case) -> dict[str, Any]:
    stats, graphs = case.running.stats, case.chain.engine.graphs
    return {
        "levels": case.levels,
        "batch": case.batch,
        "window": case.chain.window,
        "advances": len(case.seconds["ours"]),
        "rounds": case.rounds,
        "captured": graphs is not None,
        "drafter_passes_per_round": stats.levels[-1].num_forward_passes
        / sum(level.num_forward_passes for level in stats.levels[:-1]),
        "draft_acceptance_rate": [level.draft_acceptance_rate for level in stats.levels[:-1]],
        **{f"{kind}_us": timing.summary(seconds) for kind, seconds in case.seconds.items()},
    }


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases; gives the report that the JSON holds."""
    machine.require_device(args.device)
    turns = args.turns or (QUICK_TURNS if args.quick else TURNS)
    levels, batches = args.levels or LEVELS, args.batch or BATCHES
    before = machine.load_average()
    total = turns * len(levels) * len(batches)
    with progress.bar(total=total, desc="overhead", unit="turn", leave=False) as bar:
        cases = measure(levels, batches, args.device, turns, args.temperature, bar.update)
    rows = [_row(case) for case in cases]
    return {
        **machine.header("overhead", SCHEMA, args.device),
        "settings": {"turns": turns, "temperature": args.temperature, "vocab": VOCAB},
        "load": {"before": before, "after": machine.load_average()},
        "cases": rows,
        "calls": [calls.measure(name) for name in calls.CASES] if args.device == "cpu" else [],
        "targets": [
            {
                "text": f"{row['levels']} levels, batch 1, {args.device}: at most {BUDGET:g} us "
                "per round",
                "measured": row["ours_us"]["median"],
                "met": row["ours_us"]["median"] <= BUDGET,
            }
            for row in rows
            if row["batch"] == 1
        ],
    }


LEGEND = (
    "Microseconds of host time per verification round, median and quartiles over the target's "
    "rounds: a round is one verification at any level with the drafting before it. Ours: outside "
    "forward passes and compiled operators. Checks: the part of it that goes into the operators' "
    "Python functions. Operators: their compiled part. Passes: of the drafter, per round."
)


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"# Overhead of the chain, {report['device']}, {report['date']}",
        "",
        f"{report['machine']['device_name']}, {machine.conditions(report)}.",
        "",
        LEGEND,
        "",
    ]
    cuda = report["device"] == "cuda"
    heads = ["levels", "window", "batch", "ours", "quartiles", "checks", "operators", "passes"]
    heads += ["waiting for the device"] if cuda else []
    lines += [*output.table(heads, (_cells(row, cuda) for row in report["cases"])), ""]
    for target in report["targets"]:
        word = "met" if target["met"] else "**missed**"
        lines.append(f"{target['text']}: {target['measured']:.0f}, {word}")
    if report["calls"]:
        found = ([one["name"], str(one["calls"]), str(one["files"])] for one in report["calls"])
        heads = ["Python calls per round of the target", "calls", "files"]
        lines += ["", *output.table(heads, found)]
    return "\n".join(lines)


def _cells(row: dict[str, Any], cuda: bool) -> list[str]:
    ours = row["ours_us"]
    cells = [
        str(row["levels"]),
        ",".join(map(str, row["window"])),
        str(row["batch"]),
        f"{ours['median']:.0f}",
        f"{ours['q25']:.0f} to {ours['q75']:.0f}",
        f"{row['checks_us']['median']:.0f}",
        f"{row['operators_us']['median']:.0f}",
        f"{row['drafter_passes_per_round']:.1f}",
    ]
    return [*cells, f"{row['waiting_us']['median']:.0f}"] if cuda else cells


def add_command(kinds: Any) -> None:
    """Adds ``overhead`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "overhead",
        help="host time of the chain itself",
        description="Host time per verification round outside forward passes and operators, with "
        "levels whose logits lie ready; on CUDA, of rounds that are replayed graphs. Prints "
        "Markdown, or JSON.",
    )
    options.add_device(sub)
    output.add_report(sub, report_of, markdown)
    sub.add_argument("--quick", action="store_true", help="few turns")
    sub.add_argument(
        "--levels",
        type=options.listed(options.integer(2)),
        metavar="N,...",
        help="(default: 2,3,4)",
    )
    sub.add_argument("--batch", type=options.COUNTS, metavar="B,...", help="(default: 1,8,32)")
    sub.add_argument(
        "--turns", type=options.COUNT, metavar="N", help="(default: 20; with --quick 4)"
    )
    options.add_temperature(sub, 1.0)
