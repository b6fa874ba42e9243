"""``bench kernels``: every operator on a grid, beside its peers, in turns within one run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from polyspec_ext import progress
from polyspec_ext.bench import (
    grid,
    inputs,
    kernels_table,
    machine,
    output,
    peers,
    plot,
    targets,
    timing,
)
from polyspec_ext.bench.operators import OPERATORS
from polyspec_ext.command import options
from polyspec_ext.errors import PolyspecError

SCHEMA = 1  # of the JSON report
REPEATS, QUICK_REPEATS = 60, 20


def cases_of(args: argparse.Namespace) -> list[grid.Case]:
    """The grid that the options describe."""
    names = args.operators or list(OPERATORS)
    unknown = [name for name in names if name not in OPERATORS]
    if unknown:
        raise ValueError(f"--operators: expected {', '.join(OPERATORS)}, given {unknown[0]!r}")
    filters = [grid.Filters.parse(text) for text in args.filters] if args.filters else None
    axes: dict[str, Sequence[Any] | None] = {
        "batch": args.batch,
        "draft_len": args.draft_len,
        "vocab": args.vocab,
        "dtype": args.dtype,
        "acceptance": args.acceptance,
        "filters": filters,
    }
    cases: list[grid.Case] = []
    for name in names:
        center = grid.base(name, OPERATORS[name].verifies, args.device)
        if any(values is not None for values in axes.values()):
            cases += grid.product(center, axes)
        else:
            cases += grid.quick(center) if args.quick else grid.star(center, args.device)
    return cases


def measure_case(
    case: grid.Case,
    *,
    device: str,
    clock: timing.Clock,
    repeats: int,
    seed: int,
    with_peers: bool = True,
    compiled: bool = False,
    copy_gbs: float = 1.0,
    tick: Any = lambda: None,
) -> dict[str, Any]:
    """Measures one case; gives its part of the report."""
    operator = OPERATORS[case.operator]
    feed = inputs.make(case, device, seed)
    acceptance = None
    if operator.verifies:
        measured, blocks = inputs.measured_acceptance(feed)
        acceptance = {
            "asked": case.acceptance,
            "expected": feed.expected_acceptance,
            "measured": measured,
            "blocks": blocks,
        }
    contenders = [operator.ours(feed)]
    notes: list[str] = []
    if with_peers:
        others, notes = peers.contenders(case.operator, feed, compiled=compiled)
        contenders += others
    timed, failures = timing.measure(contenders, feed.load, repeats, clock, tick)
    if not timed or timed[0].contender is not contenders[0]:
        raise PolyspecError(f"{case} does not run: {failures[contenders[0].name]}")
    notes += [f"{name}: {reason}" for name, reason in failures.items()]
    ours = timed[0]
    useful = statistics.fmean(operator.bytes(case, accepted) for accepted in ours.accepted or [[]])
    rows = [_row(one, ours, useful, copy_gbs) for one in timed]
    accepted = [count for counts in ours.accepted for count in counts]
    return {
        **{name: value for name, value in asdict(case).items() if name != "acceptance"},
        "filters": str(case.filters),
        "acceptance_asked": case.acceptance,
        "acceptance": acceptance,
        "mean_accepted": statistics.fmean(accepted) if accepted else None,
        "bytes": useful,
        "rows": rows,
        "notes": notes,
    }


def _row(one: timing.Timed, ours: timing.Timed, useful: float, copy_gbs: float) -> dict[str, Any]:
    summary = timing.Summary.of(one.seconds)
    moved = float(one.contender.cost([])) if one.contender.cost else useful
    gbs = moved / summary.median * 1e-3
    ratio = None if one is ours else asdict(timing.ratio(one.seconds, ours.seconds))
    accepted = [count for counts in one.accepted for count in counts]
    return {
        "name": one.contender.name,
        "repeats": len(one.seconds),
        "median_us": summary.median,
        "q25_us": summary.q25,
        "q75_us": summary.q75,
        "mean_us": summary.mean,
        "bytes": moved,
        "gbs": gbs,
        "percent_of_copy": 100 * gbs / copy_gbs,
        "mean_accepted": statistics.fmean(accepted) if accepted else None,
        "ratio": ratio,
        "graph": one.graph,
    }


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases; gives the report that the JSON holds."""
    device = args.device
    machine.require_device(device)
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    cases = cases_of(args)
    torch.manual_seed(args.seed)
    cold = device == "cuda" if args.cold is None else args.cold
    clock: timing.Clock
    if device == "cuda":
        clock = timing.CudaClock(cold)
    else:
        clock = timing.CpuClock(cold, args.processor_time)
    before = machine.load_average()
    busy = machine.is_busy(before, torch.get_num_threads(), machine.cores(), clock)
    copy_gbs = timing.copy_bandwidth(clock, device)
    measured: list[dict[str, Any]] = []

    def report() -> dict[str, Any]:
        return {
            **machine.header("kernels", SCHEMA, device, dated=True),
            "settings": {
                "repeats": repeats,
                "cold": cold,
                "seed": args.seed,
                "quick": args.quick,
                "clock": clock.kind,
            },
            "load": {"before": before, "after": machine.load_average(), "busy": busy},
            "copy_gbs": copy_gbs,
            "complete": len(measured) == len(cases),
            "cases": measured,
            "targets": [asdict(target) for target in targets.check(measured, device, busy=busy)],
        }

    with progress.bar(total=len(cases) * repeats, unit="turn", smoothing=0.05) as bar:
        for case in cases:
            bar.set_description(str(case))
            measured.append(
                measure_case(
                    case,
                    device=device,
                    clock=clock,
                    repeats=repeats,
                    seed=args.seed,
                    with_peers=not args.no_peers,
                    compiled=not (args.no_compile or args.quick),
                    copy_gbs=copy_gbs,
                    tick=bar.update,
                )
            )
            if args.json_file:
                output.replace_file(Path(args.json_file), json.dumps(report(), indent=1) + "\n")
    return report()


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes <device>-<date>.json, .md and, with matplotlib, .png; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{report['device']}-{report['date']}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(kernels_table.markdown(report), encoding="utf-8")
    if plot.available():
        paths.append(folder / f"{stem}.png")
        plot.draw(report, paths[-1])
    return paths


def add_command(kinds: Any) -> None:
    """Adds ``kernels`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "kernels",
        help="every operator beside its peers",
        description="Every operator on a grid of shapes, beside every peer that can be imported, "
        "in turns within one run: median, quartiles, useful GB/s, per cent of the copy bandwidth "
        "of the same run, ratios with 95 per cent confidence intervals. Prints Markdown, or JSON.",
        epilog="Axes that are not given keep the base case, and a default grid varies one axis at "
        "a time; as soon as one axis is given, the grid is the product of all axes.",
    )
    options.add_device(sub)
    options.add_json(sub)
    sub.add_argument(
        "--json-file",
        metavar="FILE",
        help="also write the JSON to FILE, after every case: what is there stays if the run is cut "
        "short",
    )
    sub.add_argument("--quick", action="store_true", help="the targets' cases only, few repeats")
    sub.add_argument(
        "--output", metavar="DIR", help="write JSON, Markdown and a plot (PNG) into DIR"
    )
    axes = sub.add_argument_group("grid")
    axes.add_argument("--operators", type=options.words, metavar="NAME,...", help="(default: all)")
    axes.add_argument("--batch", type=options.COUNTS, metavar="B,...", help="requests")
    axes.add_argument("--draft-len", type=options.COUNTS, metavar="K,...", help="draft tokens")
    axes.add_argument("--vocab", type=options.COUNTS, metavar="V,...", help="vocabulary")
    axes.add_argument(
        "--dtype", type=options.words, metavar="NAME,...", help="float32,bfloat16,float16"
    )
    axes.add_argument("--acceptance", type=options.SHARES, metavar="A,...", help="per draft token")
    axes.add_argument(
        "--filters",
        type=options.words,
        metavar="F,...",
        help="none, or top-k, top-p and min-p joined by +, as in none,top_k=50+top_p=.9",
    )
    runs = sub.add_argument_group("measurement")
    runs.add_argument(
        "--repeats",
        type=options.COUNT,
        metavar="N",
        help="turns per case (default: 60; with --quick 20)",
    )
    runs.add_argument(
        "--no-peers", action="store_true", help="the operators alone, for quick comparisons"
    )
    runs.add_argument("--no-compile", action="store_true", help="no torch.compile'd peers")
    runs.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="flush the caches before every call (default: on CUDA only)",
    )
    options.add_processor_time(runs)
    options.add_threads(runs)
    options.add_seed(runs, "of logits and draws")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The subcommand."""
    if args.output and not plot.available():
        print(plot.MISSING, file=sys.stderr)
    report = report_of(args)
    output.show(report, kernels_table.markdown, as_json=args.json)
    if args.output:
        for path in write(report, Path(args.output)):
            print(f"wrote {path}", file=sys.stderr)
    return 0
