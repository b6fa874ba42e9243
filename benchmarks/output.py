"""Reports of benchmarks: machine, versions and load, tables in Markdown, JSON in files, and the
subcommands that print them."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from polyspec_ext import _C, columns, ops, processor
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError
from polyspec_ext.files import replace_text

Report = dict[str, Any]
REPEATED: dict[str, Any] = {"action": "append"}  # of an option, for `add_command`


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()
) -> list[str]:
    """Return the lines of a Markdown table. `numbers`: indices of right-aligned columns, from
    0."""
    marks = ["---:" if column in numbers else "---" for column in range(len(heads))]
    first, *others = (
        "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (heads, *rows)
    )
    return [first, "|" + "|".join(marks) + "|", *others]


def number(value: float | None, form: str) -> str:
    """Format a value by `form`; None: "-"."""
    return "-" if value is None else format(value, form)


def show(markdown: str) -> None:
    """Print Markdown; on a terminal, with drawn tables and wrapped paragraphs."""
    print(columns.fitted(markdown) if sys.stdout.isatty() else markdown, flush=True)


def save(args: argparse.Namespace, report: Report) -> None:
    """Write the report so far to the file of ``--json-file``, if any."""
    if getattr(args, "json_file", None):
        replace_text(Path(args.json_file), json.dumps(report, indent=1) + "\n")


def add_command(
    kinds: Any,
    name: str,
    text: str | None,
    rows: Iterable[str | tuple[Any, ...]],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add a benchmark.

    Args:
        text: a docstring: a line, and the description.
        rows: options: a shared option by its name, a flag by its name and help, else name, type,
            default, metavar and help. A type is a function of the text, a tuple of choices, or
            a dictionary of arguments of `add_argument`.
        run: runs the benchmark, and returns the exit status.
    """
    line, _, rest = str(text).partition("\n\n")
    sub = kinds.add_parser(name, help=line.rstrip("."), description=f"{line} {rest}")
    for row in rows:
        if isinstance(row, str):
            options.share(sub, row)
        elif len(row) == 2:
            options.add_flag(sub, *row)
        else:
            option, kind, default, metavar, note = row
            taken = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
            taken = kind if isinstance(kind, dict) else taken
            shown = note if default in (None, [], "") else f"{note} (default: %(default)s)".strip()
            sub.add_argument(option, default=default, metavar=metavar, help=shown, **taken)
    sub.set_defaults(run=run)


def add_report(kinds: Any, name: str, module: Any) -> None:
    """Add a benchmark that prints a report as Markdown or as JSON: `module.report_of` measures and
    returns a report, `module.markdown` formats the report, and `module.status`, if there is one,
    returns the exit status."""

    def run(args: argparse.Namespace) -> int:
        processor.note_load()
        report: Report = module.report_of(args)
        save(args, report)
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            show(module.markdown(report))
        return int(module.status(report)) if hasattr(module, "status") else 0

    json_file = ("--json-file", None, None, "FILE", "also write the JSON to FILE")
    shared = (("--json", "one JSON object instead of Markdown"), json_file, "--threads")
    add_command(kinds, name, module.__doc__, (*shared, *module.OPTIONS), run)


def describe(device: str) -> Report:
    """Return processor, versions and commit of the measurement, without paths."""
    return {
        "device_name": torch.cuda.get_device_name() if device == "cuda" else processor.name(),
        "cpu": processor.name(),
        "cores": processor.cores(),
        "threads": torch.get_num_threads(),
        "cpu_capability": processor.instructions(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "polyspec": _C.build_info(),
        "commit": commit(),
    }


def header(kind: str, schema: int, device: str = "cpu") -> Report:
    """Return the head of the JSON report of ``benchmarks <kind>``, before the measurement.
    `schema`: version of the report's format. The date is in UTC."""
    return {
        "schema": schema,
        "command": f"bench {kind}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "machine": describe(device),
        "load": {"before": processor.load_average()},
    }


def require_device(device: str) -> None:
    """Refuse a device on which the operators do not run (PolyspecError)."""
    if device == "cuda" and not ops.has_cuda():
        raise PolyspecError("--device cuda: no CUDA device, or a build without CUDA kernels")


def commit() -> str | None:
    """Return the short commit of this checkout, "+" for local changes; None: no checkout."""
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"]
    if not (root / ".git").exists():  # perhaps installed into another checkout
        return None
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def conditions(report: Mapping[str, Any]) -> str:
    """Describe threads, torch and load of a report."""
    where, load = report["machine"], report["load"]["before"]
    text = f"{where['threads']} threads of {where['cores']} cores, torch {where['torch']}, "
    text += f"load average {load:.1f} before"
    busy = processor.is_busy(load, where["threads"], where["cores"])
    return f"{text} (busy: {processor.BUSY})" if busy and report.get("device") != "cuda" else text
