"""Benchmarks: ``python -m polyspec_ext bench kernels|overhead|generate|levels``. Each kind adds a
subcommand here.

This module is light, so that the command line can be built without importing what is measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from polyspec_ext.cli import options
from polyspec_ext.cli.run import help_of

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds ``bench`` and its kinds to the subcommands of a parser."""
    parser = commands.add_parser(
        "bench", help="benchmarks", description="Benchmarks, each beside what it competes with."
    )
    parser.set_defaults(run=help_of(parser))
    kinds = parser.add_subparsers(metavar="WHAT")
    _add_kernels(kinds)
    _add_overhead(kinds)
    _add_generate(kinds)
    _add_levels(kinds)


def _add_kernels(kinds: Any) -> None:
    sub = kinds.add_parser(
        "kernels",
        help="every operator beside its peers",
        description="Every operator on a grid of shapes, beside every peer that can be imported, "
        "in turns within one run: median, quartiles, useful GB/s, per cent of the copy bandwidth "
        "of the same run, ratios with 95 per cent confidence intervals. Prints Markdown, or JSON.",
        epilog="Axes that are not given keep the base case, and a default grid varies one axis at "
        "a time; as soon as one axis is given, the grid is the product of all axes.",
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
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
    runs.add_argument(
        "--processor-time",
        action="store_true",
        help="CPU: processor time of the process in place of wall time, for a machine that is "
        "busy with something else; says what wall time would only with --threads 1",
    )
    options.add_threads(runs)
    runs.add_argument(
        "--seed", type=options.SEED, metavar="S", default=0, help="of logits and draws (default: 0)"
    )
    sub.set_defaults(run=_kernels)


def _kernels(args: argparse.Namespace) -> int:
    from polyspec_ext.bench import kernels

    return kernels.run(args)


def _add_overhead(kinds: Any) -> None:
    sub = kinds.add_parser(
        "overhead",
        help="host time of the chain itself",
        description="Host time per verification round outside forward passes and operators, eager, "
        "with levels whose logits lie ready. Prints Markdown, or JSON.",
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
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
    sub.add_argument(
        "--temperature",
        type=options.number(0),
        default=1.0,
        metavar="T",
        help="(default: %(default)s)",
    )
    options.add_threads(sub)
    sub.set_defaults(run=_overhead)


def _overhead(args: argparse.Namespace) -> int:
    from polyspec_ext.bench import overhead

    return overhead.run(args)


def _add_generate(kinds: Any) -> None:
    sub = kinds.add_parser(
        "generate",
        help="tokens per second beside plain and assisted generation",
        description="Tokens per second of the shipped chains beside plain decoding and "
        "transformers' assisted generation with the same models, in turns within one run. Prints "
        "Markdown, or JSON.",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    sub.add_argument(
        "--prompts",
        type=options.COUNT,
        default=8,
        metavar="N",
        help="questions (default: %(default)s)",
    )
    sub.add_argument(
        "--questions",
        type=options.file,
        metavar="FILE",
        help='JSON lines with "question" (default: GSM8K\'s test split where it lies beside the '
        "repository, else built-in ones)",
    )
    sub.add_argument(
        "--repeats", type=options.COUNT, default=5, metavar="N", help="(default: %(default)s)"
    )
    sub.add_argument(
        "--batch",
        type=options.COUNT,
        default=8,
        metavar="B",
        help="of the batched runs (default: %(default)s)",
    )
    sub.add_argument(
        "--max-new-tokens",
        type=options.COUNT,
        default=128,
        metavar="N",
        help="(default: %(default)s)",
    )
    sub.add_argument(
        "--compile",
        choices=("none", "all"),
        default="all",
        help="the chains and plain decoding through torch.compile as well, or nothing (needs a C++ "
        "compiler; default: %(default)s)",
    )
    sub.add_argument(
        "--ignore-eos",
        action="store_true",
        help="every text goes on to --max-new-tokens, so that no row of a batch ends early",
    )
    sub.add_argument(
        "--temperature",
        type=options.TEMPERATURES,
        default=[0.0, 1.0],
        metavar="T,...",
        help="(default: 0,1)",
    )
    sub.add_argument(
        "--seed", type=options.SEED, metavar="S", default=0, help="(default: %(default)s)"
    )
    sub.add_argument(
        "--processor-time",
        action="store_true",
        help="processor time of the process in place of wall time, for a machine that is busy with "
        "something else; says what wall time would only with --threads 1",
    )
    options.add_threads(sub)
    sub.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from polyspec_ext.bench import generation

    return generation.run(args)


def _add_levels(kinds: Any) -> None:
    sub = kinds.add_parser(
        "levels",
        help="forward passes of the shipped models, by how they run",
        description="Milliseconds of a forward pass of each shipped model on this processor: "
        "float32 and bfloat16, weights packed and as torch keeps them, compiled and not, by number "
        "of tokens, in turns within one run. Prints Markdown, or JSON.",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    sub.add_argument(
        "--repeats",
        type=options.COUNT,
        default=60,
        metavar="N",
        help="turns (default: %(default)s)",
    )
    sub.add_argument(
        "--tokens", type=options.COUNTS, metavar="N,...", help="of a pass (default: 1,2,4,6,8)"
    )
    sub.add_argument(
        "--compile",
        choices=("none", "all"),
        default="none",
        help="through torch.compile as well, which takes minutes (default: %(default)s)",
    )
    options.add_threads(sub)
    sub.set_defaults(run=_levels)


def _levels(args: argparse.Namespace) -> int:
    from polyspec_ext.bench import levels

    return levels.run(args)
