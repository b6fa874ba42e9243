"""``python -m polyspec_ext bench shapes``."""

from __future__ import annotations

from typing import Any

from ...bench import shapes
from ...bench.published_shapes import SHAPES
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``shapes`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "shapes",
        help="passes at the true shape of a published model, with random weights",
        description="Times the passes of a target, its 4-bit copy and an EAGLE-2 head at the true "
        "shape of a published model, with random weights, against the bandwidth floor, and "
        "predicts from them the speedups that given acceptances would have. Random weights say "
        "nothing about acceptance. Prints Markdown, or JSON.",
    )
    sub.add_argument("--shape", choices=tuple(SHAPES), required=True)
    options.add_device(sub)
    options.add_json(sub)
    options.add_json_file(sub)
    sub.add_argument(
        "--layers",
        type=options.COUNT,
        metavar="N",
        help="measure N of the layers, and extrapolate the whole by their number (default: all)",
    )
    sub.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="(default: %(default)s)",
    )
    sub.add_argument("--tokens", type=options.COUNTS, metavar="N,...", help="of a pass")
    options.add_count(sub, "--repeats", 7, "turns")
    sub.add_argument(
        "--compile",
        choices=("none", "all"),
        default="none",
        help="on the CPU, through torch.compile as well, which takes minutes (default: "
        "%(default)s); on CUDA passes are captured as graphs in any case",
    )
    options.add_threads(sub)
    sub.set_defaults(run=shapes.run)
