"""``python -m polyspec_ext bench report``."""

from __future__ import annotations

from typing import Any

from ...bench.paper import report
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``report`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "report",
        help="the papers' tables and figures from saved runs",
        description="Draws the report of saved runs of `bench paper` anew, beside what the papers "
        "print: Markdown, CSV, JSON, PNG and one static page, into a folder. Several runs stand "
        "side by side; nothing of one enters another's numbers. Prints the overall table.",
    )
    sub.add_argument("runs", type=options.folder, nargs="+", metavar="RUN", help="folder of a run")
    sub.add_argument(
        "--output", metavar="DIR", help="(default: the folder of the run, where it is one)"
    )
    sub.set_defaults(run=report.run)
