"""How a benchmark puts out its report: tables in Markdown, JSON on standard output and in files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from polyspec_ext import columns, processor
from polyspec_ext.cli import options
from polyspec_ext.files import replace_text


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()
) -> list[str]:
    """Return the lines of a Markdown table. Of columns whose places, from 0, are in `numbers`,
    cells are aligned to the right."""
    marks = ["---:" if column in numbers else "---" for column in range(len(heads))]
    return [_line(heads), "|" + "|".join(marks) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def number(value: float | None, form: str) -> str:
    """Show a value in the format `form`; "-" where there is none."""
    return "-" if value is None else format(value, form)


def token_count(count: int) -> str:
    """Write "1 token" or "2 tokens"."""
    return f"{count} token{'s' * (count > 1)}"


def show(markdown: str) -> None:
    """Print Markdown, on a terminal in as many columns as tables may have there."""
    print(columns.fitted(markdown) if sys.stdout.isatty() else markdown, flush=True)


def save(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Replace the file of ``--json-file``, if there is one, by the report so far."""
    if getattr(args, "json_file", None):
        replace_text(Path(args.json_file), json.dumps(report, indent=1) + "\n")


def add_report(
    parser: argparse.ArgumentParser,
    report_of: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    status: Callable[[dict[str, Any]], int] = lambda report: 0,
) -> None:
    """Have a command print a report, as Markdown or as JSON; add its options
    ``--json``, ``--json-file`` and ``--threads``.

    Args:
        report_of: measures.
        status: the exit status that goes with a report.
    """
    options.add_flag(parser, "--json", "one JSON object instead of Markdown")
    parser.add_argument("--json-file", metavar="FILE", help="also write the JSON to FILE")
    options.share(parser, "--threads")

    def run(args: argparse.Namespace) -> int:
        processor.note_load()
        report = report_of(args)
        save(args, report)
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            show(markdown(report))
        return status(report)

    parser.set_defaults(run=run)
