"""``benchmarks kernels``: every operator on a grid, beside its peers, in turns within one run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import (
    cost,
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
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError

SCHEMA = 1  # of the JSON report
REPEATS, QUICK_REPEATS = 60, 20


def cases_of(args: argparse.Namespace) -> list[grid.Case]:
    """The grid that the options describe."""
    names = args.operators or grid.OPERATORS
    unknown = [name for name in names if name not in grid.OPERATORS]
    if unknown:
        known = ", ".join(grid.OPERATORS)
        raise ValueError(f"--operators: expected {known}, given {unknown[0]!r}")
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
        center = grid.base(name, args.device)
        if any(values is not None for values in axes.values()):
            cases += grid.product(center, axes)
        else:
            cases += grid.quick(center) if args.quick else grid.star(center, args.device)
    return cases


def ours(feed: inputs.Feed) -> timing.Contender:
    """The operator of a case, which its peers are compared with."""
    operator, options = feed.case.operator, {**feed.case.filters.given(), "seed": feed.seeds}
    if operator == "sample":
        return timing.Contender("polyspec", partial(ps.sample, feed.target[:, -1], **options))
    options["rule"] = grid.RULES[operator]
    if operator != "verify-token-bare":
        options["draft_statistics"] = feed.statistics
    call = partial(ps.verify, feed.target, feed.tokens, feed.draft, **options)
    return timing.Contender("polyspec", call, accepted=attrgetter("num_accepted"))


def measure_case(
    case: grid.Case,
    args: argparse.Namespace,
    *,
    clock: timing.Clock,
    repeats: int,
    copy_gbs: float,
    tick: Callable[[], object],
) -> dict[str, Any]:
    """Measures one case; gives its part of the report."""
    feed = inputs.make(case, args.device, args.seed)
    acceptance = None
    if case.operator in grid.RULES:
        measured, blocks = inputs.measured_acceptance(feed)
        acceptance = {
            "asked": case.acceptance,
            "expected": feed.expected_acceptance,
            "measured": measured,
            "blocks": blocks,
        }
    others: list[timing.Contender] = []
    notes: list[str] = []
    if not args.no_peers:
        others, notes = peers.contenders(feed, compiled=not (args.no_compile or args.quick))
    first = ours(feed)
    timed, failures = timing.measure([first, *others], feed.load, repeats, clock, tick)
    if first.name in failures:
        raise PolyspecError(f"{case} does not run: {failures[first.name]}")
    notes += [f"{name}: {reason}" for name, reason in failures.items()]
    useful = statistics.fmean(cost.bytes_of(case, counts) for counts in timed[0].accepted or [[]])
    return {
        **{name: value for name, value in asdict(case).items() if name != "acceptance"},
        "filters": str(case.filters),
        "acceptance_asked": case.acceptance,
        "acceptance": acceptance,
        "mean_accepted": _mean_accepted(timed[0]),
        "bytes": useful,
        "rows": [_row(one, timed[0], useful, copy_gbs) for one in timed],
        "notes": notes,
    }


def _mean_accepted(one: timing.Timed) -> float | None:
    counts = [count for turn in one.accepted for count in turn]
    return statistics.fmean(counts) if counts else None


def _row(one: timing.Timed, ours: timing.Timed, useful: float, copy_gbs: float) -> dict[str, Any]:
    summary = timing.summary(one.seconds)
    moved = useful if one.contender.bytes is None else float(one.contender.bytes)
    gbs = moved / summary["median"] * 1e-3
    return {
        "name": one.contender.name,
        "repeats": len(one.seconds),
        **{f"{name}_us": value for name, value in summary.items()},
        "bytes": moved,
        "gbs": gbs,
        "percent_of_copy": 100 * gbs / copy_gbs,
        "mean_accepted": _mean_accepted(one),
        "ratio": None if one is ours else timing.ratio(one.seconds, ours.seconds),
        "graph": one.graph,
    }


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases; gives the report that the JSON holds."""
    device = args.device
    machine.require_device(device)
    if args.output and not plot.available():
        print(plot.MISSING, file=sys.stderr)
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    cases = cases_of(args)
    torch.manual_seed(args.seed)
    cold = device == "cuda" if args.cold is None else args.cold
    clock: timing.Clock = (
        timing.CudaClock(cold) if device == "cuda" else timing.CpuClock(cold, args.processor_time)
    )
    before = machine.load_average()
    busy = machine.is_busy(before, torch.get_num_threads(), machine.cores(), clock)
    copy_gbs = timing.copy_bandwidth(clock, device)
    measured: list[dict[str, Any]] = []

    def report() -> dict[str, Any]:
        return {
            **machine.header("kernels", SCHEMA, device),
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
                    args,
                    clock=clock,
                    repeats=repeats,
                    copy_gbs=copy_gbs,
                    tick=bar.update,
                )
            )
            output.save(args, report())
    complete = report()
    if args.output:
        write(complete, Path(args.output))
    return complete


def write(report: dict[str, Any], folder: Path) -> None:
    """Writes <device>-<date>.json, .md and, with matplotlib, .png, and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['device']}-{report['date']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page, picture = path.with_suffix(".md"), path.with_suffix(".png")
    page.write_text(kernels_table.markdown(report), encoding="utf-8")
    written = [path, page]
    if plot.available():
        plot.draw(report, picture)
        written.append(picture)
    for one in written:
        print(f"wrote {one}", file=sys.stderr)


def add_command(kinds: Any) -> None:
    """Adds ``kernels`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "kernels",
        help="every operator beside its peers",
        description="Every operator on a grid of shapes, beside every peer that can be imported, "
        "in turns within one run: median, quartiles, useful GB/s, per cent of the copy bandwidth "
        "of the same run, ratios with 95 per cent confidence intervals. Prints Markdown, or JSON. "
        "The file of --json-file is written after every case: what is there stays if the run is "
        "cut short.",
        epilog="Axes that are not given keep the base case, and a default grid varies one axis at "
        "a time; as soon as one axis is given, the grid is the product of all axes.",
    )
    options.add_device(sub)
    output.add_report(sub, report_of, kernels_table.markdown)
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
    options.add_seed(runs, "of logits and draws")
