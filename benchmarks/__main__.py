"""``python -m benchmarks NAME``: each benchmark beside its competitors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from polyspec_ext.cli import help_of, options, run_command

from . import chosen, contexts, demo, int4, law, operators, output, overhead, paper, serving

REPORTS: dict[str, Any] = {
    "contexts": contexts, "demo": demo, "kernels": operators, "overhead": overhead,
    "int4": int4, "shapes": chosen, "serving": serving, "law": law,
}  # fmt: skip
COMMANDS = {
    "paper": (paper.__doc__, paper.OPTIONS, paper.run),
    "report": (paper.report.__doc__, paper.REPORT_OPTIONS, paper.report),
}


def make_parser() -> argparse.ArgumentParser:
    text = "Benchmarks, each beside what it competes with."
    parser = options.Parser(prog="python -m benchmarks", description=text)
    parser.set_defaults(run=help_of(parser))
    kinds = parser.add_subparsers(metavar="NAME")
    for name, command in COMMANDS.items():
        output.add_command(kinds, name, *command)
    for name, module in REPORTS.items():
        output.add_report(kinds, name, module)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and return the exit status. Bad input: a line on stderr and status 2."""
    return run_command(make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
