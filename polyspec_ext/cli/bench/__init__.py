"""``python -m polyspec_ext bench kernels|overhead|generate|chains|levels|int4|adaptation|paper|
report|shapes``: the options of each kind.
"""

from __future__ import annotations

from typing import Any

from ...command.run import help_of
from . import (
    adaptation,
    chains,
    generation,
    int4,
    kernels,
    levels,
    overhead,
    paper,
    report,
    shapes,
)

KINDS = (
    kernels,
    overhead,
    generation,
    chains,
    levels,
    int4,
    adaptation,
    paper,
    report,
    shapes,
)

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds ``bench`` and its kinds to the subcommands of a parser."""
    parser = commands.add_parser(
        "bench", help="benchmarks", description="Benchmarks, each beside what it competes with."
    )
    parser.set_defaults(run=help_of(parser))
    kinds = parser.add_subparsers(metavar="WHAT")
    for kind in KINDS:
        kind.add_command(kinds)
