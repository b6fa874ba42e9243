"""``python -m polyspec_ext bench int4``."""

from __future__ import annotations

from typing import Any

from ...bench import int4
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``int4`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "int4",
        help="the product with 4-bit weights beside torch's",
        description="Products of a few tokens with 4-bit weights, beside torch's int4 operator "
        "and bfloat16 weights, in turns within one run. Prints Markdown, or JSON.",
    )
    options.add_json(sub)
    options.add_count(sub, "--repeats", 15, "turns")
    sub.add_argument(
        "--tokens", type=options.COUNTS, metavar="M,...", help="(default: 1,2,4,6,8,12,16)"
    )
    sub.add_argument(
        "--shapes",
        type=options.words,
        metavar="NxK,...",
        help="outputs x inputs (default: 4096x4096,1024x2560,5120x1024)",
    )
    options.add_processor_time(sub)
    options.add_threads(sub)
    sub.set_defaults(run=int4.run)
