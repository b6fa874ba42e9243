"""``bench levels``: milliseconds of a forward pass of each shipped model, by how it runs and its
number of tokens, in turns within one run."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from polyspec_ext import progress, tiny
from polyspec_ext.bench import machine, output
from polyspec_ext.levels import HuggingFaceLevel, load
from polyspec_ext.tuning import LevelConfig, pass_seconds

SCHEMA = 1  # of the JSON report
WIDTHS = (1, 2, 4, 6, 8)
DTYPES = (torch.float32, torch.bfloat16)


def measure(
    name: str, widths: list[int], repeats: int, compile: bool
) -> dict[LevelConfig, dict[int, float]]:
    """Seconds of passes of a shipped model; what this processor cannot run is left out."""
    levels: dict[LevelConfig, HuggingFaceLevel] = {}
    for dtype in DTYPES:
        with progress.loading(shown=False):
            model = load(tiny.path(name), dtype).model
        for compiled in (False, True) if compile else (False,):
            for pack in (False, True):
                config = LevelConfig(dtype, pack, compiled)
                try:
                    level = HuggingFaceLevel(model, pack=pack, compile=compiled)
                    pass_seconds([level], widths, repeats=1)
                except (ValueError, RuntimeError) as error:
                    progress.note(f"{name}, {config}: left out: {error}")
                else:
                    levels[config] = level
    limit = float("inf")  # all repeats, however long they take
    times = pass_seconds(list(levels.values()), widths, repeats=repeats, limit=limit)
    return dict(zip(levels, times, strict=True))


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    before = machine.load_average()
    widths = args.tokens or list(WIDTHS)
    rows = [
        {"level": name, "config": str(config), "ms": [1e3 * times[width] for width in widths]}
        for name in tiny.LEVELS
        for config, times in measure(name, widths, args.repeats, args.compile == "all").items()
    ]
    return {
        **machine.header("levels", SCHEMA, "cpu"),
        "settings": {"repeats": args.repeats, "tokens": widths},
        "load": {"before": before, "after": machine.load_average()},
        "rows": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    where, settings = report["machine"], report["settings"]
    lines = [
        f"# Forward passes of the shipped models, {where['cpu']}",
        "",
        f"{where['cpu_capability']}, {machine.conditions(report)}.",
        "",
        f"Milliseconds of one pass of one sequence, the fastest of {settings['repeats']} in turns.",
        "",
    ]
    lines += output.table(
        ["", *map(output.token_count, settings["tokens"])],
        (
            [f"{row['level']}, {row['config']}", *(f"{value:.2f}" for value in row["ms"])]
            for row in report["rows"]
        ),
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """The subcommand."""
    report = report_of(args)
    output.show(report, markdown, as_json=args.json)
    return 0
