"""Benchmarks: ``python -m polyspec_ext bench kernels|overhead|generate``. Each kind adds a
subcommand here.

This module is light, so that the command line can be built without importing what is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds ``bench`` and its kinds to the subcommands of a parser."""
    parser = commands.add_parser(
        "bench", help="benchmarks", description="Benchmarks, each beside what it competes with."
    )
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_kernels(kinds)
    _add_overhead(kinds)
    _add_generate(kinds)


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers as in 1,8, given {text!r}") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in .7,.9, given {text!r}") from None


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _add_kernels(kinds: Any) -> None:
    sub = kinds.add_parser(
        "kernels",
        help="every operator beside its peers",
        description="Every operator on a grid of shapes, beside every peer that can be imported, "
        "in turns within one run: median, quartiles, useful GB/s, per cent of the copy bandwidth "
        "of the same run, ratios with 95 %% confidence intervals. Prints Markdown, or JSON.",
        epilog="Axes that are not given keep the base case, and a default grid varies one axis at "
        "a time; as soon as one axis is given, the grid is the product of all axes.",
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    sub.add_argument("--quick", action="store_true", help="the targets' cases only, few repeats")
    sub.add_argument(
        "--output", metavar="DIR", help="write JSON, Markdown and a plot (PNG) into DIR"
    )
    axes = sub.add_argument_group("grid")
    axes.add_argument("--operators", type=_words, metavar="NAME,...", help="(default: all)")
    axes.add_argument("--batch", type=_integers, metavar="B,...", help="requests")
    axes.add_argument("--draft-len", type=_integers, metavar="K,...", help="draft tokens")
    axes.add_argument("--vocab", type=_integers, metavar="V,...", help="vocabulary")
    axes.add_argument("--dtype", type=_words, metavar="NAME,...", help="float32,bfloat16,float16")
    axes.add_argument("--acceptance", type=_numbers, metavar="A,...", help="per draft token")
    axes.add_argument(
        "--filters",
        type=_words,
        metavar="F,...",
        help="none, or top-k, top-p and min-p joined by +, as in none,top_k=50+top_p=.9",
    )
    runs = sub.add_argument_group("measurement")
    runs.add_argument(
        "--repeats", type=int, metavar="N", help="turns per case (default: 60; with --quick 20)"
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
    runs.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    runs.add_argument("--seed", type=int, default=0, help="of logits and draws (default: 0)")
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
    sub.add_argument("--levels", type=_integers, metavar="N,...", help="(default: 2,3,4)")
    sub.add_argument("--batch", type=_integers, metavar="B,...", help="(default: 1,8,32)")
    sub.add_argument("--turns", type=int, metavar="N", help="(default: 20; with --quick 4)")
    sub.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="(default: %(default)s)"
    )
    sub.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
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
        "--prompts", type=int, default=8, metavar="N", help="questions (default: %(default)s)"
    )
    sub.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help='JSON lines with "question" (default: GSM8K\'s test split where it lies beside the '
        "repository, else built-in ones)",
    )
    sub.add_argument("--repeats", type=int, default=5, metavar="N", help="(default: %(default)s)")
    sub.add_argument(
        "--batch",
        type=int,
        default=8,
        metavar="B",
        help="of the batched runs (default: %(default)s)",
    )
    sub.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)"
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
        "--temperature", type=_numbers, default=[0.0, 1.0], metavar="T,...", help="(default: 0,1)"
    )
    sub.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    sub.add_argument(
        "--processor-time",
        action="store_true",
        help="processor time of the process in place of wall time, for a machine that is busy with "
        "something else; says what wall time would only with --threads 1",
    )
    sub.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    sub.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from polyspec_ext.bench import generation

    return generation.run(args)
