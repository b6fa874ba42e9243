"""``python -m polyspec_ext bench kernels``."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench import kernels
from ...command import options


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
    sub.set_defaults(run=kernels.run)
