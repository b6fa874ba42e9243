"""``python -m polyspec_ext bench overhead``."""

from __future__ import annotations

from typing import Any

from ...bench import overhead
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``overhead`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "overhead",
        help="host time of the chain itself",
        description="Host time per verification round outside forward passes and operators, eager, "
        "with levels whose logits lie ready. Prints Markdown, or JSON.",
    )
    options.add_device(sub)
    options.add_json(sub)
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
    options.add_threads(sub)
    sub.set_defaults(run=overhead.run)
