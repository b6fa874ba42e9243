"""``python -m polyspec_ext bench kernels|model|overhead|chains|int4|adaptation|paper|...``."""

from __future__ import annotations

from typing import Any

from ..bench import adaptation, chains, int4, kernels, model, overhead, shapes
from ..bench.paper import command as paper
from ..bench.paper import report
from ..command.run import help_of

KINDS = (kernels, model, overhead, chains, int4, adaptation, paper, report, shapes)


def add_command(commands: Any) -> None:
    """Adds ``bench`` and its kinds to the subcommands of a parser."""
    parser = commands.add_parser(
        "bench", help="benchmarks", description="Benchmarks, each beside what it competes with."
    )
    parser.set_defaults(run=help_of(parser))
    kinds = parser.add_subparsers(metavar="WHAT")
    for kind in KINDS:
        kind.add_command(kinds)
