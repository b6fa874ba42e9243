"""``python -m polyspec_ext bench levels``."""

from __future__ import annotations

from typing import Any

from ...bench import levels
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``levels`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "levels",
        help="forward passes of the shipped models, by how they run",
        description="Milliseconds of a forward pass of each shipped model on this processor: "
        "float32 and bfloat16, weights packed and as torch keeps them, compiled and not, by number "
        "of tokens, in turns within one run. Prints Markdown, or JSON.",
    )
    options.add_json(sub)
    options.add_count(sub, "--repeats", 60, "turns")
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
    sub.set_defaults(run=levels.run)
