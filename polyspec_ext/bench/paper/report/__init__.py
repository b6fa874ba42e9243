"""``bench report``: the papers' tables and figures from saved runs (`bench.paper.record`), as
Markdown, CSV, JSON, PNG and one static page.

Runs stand beside each other: every run has tables of its own, and only the overview shows repeats
of the same models and settings in one table, a column each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyspec_ext.bench import plot
from polyspec_ext.command import options

from ..record import read_run
from . import figures, tables
from .form import Table
from .page import Section, caption_of, facts_of, page
from .saved import Saved

SCHEMA = 1  # of report.json
__all__ = ["SCHEMA", "load", "report_of", "run", "summary", "write"]


def load(folders: Sequence[Path]) -> list[Saved]:
    """Runs, by the names of their folders; the folder above in front where two have one name.

    Raises:
        FileNotFoundError, ValueError: a folder is none of a run; or has no turn yet; or is given
            twice.
    """
    places = [folder.resolve() for folder in folders]
    if len(set(places)) != len(places):
        raise ValueError(f"RUN: expected different folders, given {', '.join(map(str, folders))}")
    names = [place.name for place in places]
    labels = [
        name if names.count(name) == 1 else f"{place.parent.name}/{name}"
        for name, place in zip(names, places, strict=True)
    ]
    found = []
    for label, place in zip(labels, places, strict=True):
        run_there = read_run(place)
        if not run_there.turns:
            raise ValueError(f"RUN: expected a run with turns, given {place} without any")
        found.append(Saved(label, run_there))
    return found


def report_of(runs: Sequence[Saved]) -> dict[str, Any]:
    """Every table's records, as report.json has them."""
    return {
        "schema": SCHEMA,
        "command": "bench report",
        "several": {table.key: table.data() for table in _several(runs)},
        "runs": [
            {
                "label": one.label,
                **facts_of(one.about),
                "tables": {table.key: table.data() for table in tables.of_run(one)},
            }
            for one in runs
        ],
    }


def write(runs: Sequence[Saved], folder: Path) -> list[Path]:
    """Writes report.md, report.json, report.html, and a CSV file per table and a PNG file per
    figure (without matplotlib, none); gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawable = plot.available()
    several = _several(runs)
    title = "Benchmark report: " + ", ".join(dict.fromkeys(r.target_name for r in runs))
    note = (
        "What is slower than plain decoding is shown like the rest, in red on the page."
        + " Nothing of one run enters another's numbers." * (len(runs) > 1)
    )
    sections, text, files = [], [f"# {title}", "", note, ""], dict[str, str | bytes]()
    for one in runs:
        own = tables.of_run(one)
        prefix = f"{_slug(one.label)}-" if len(runs) > 1 else ""
        drawn = figures.of_run(one) if drawable else {}
        facts = json.dumps(facts_of(one.about), indent=1, ensure_ascii=False)
        sections.append(Section(one.label, summary(one), own, drawn, facts))
        text += [f"## {one.label}", "", summary(one), ""]
        shown = [table.markdown() for table in own]
        text += [*shown[:1], *_pictures(drawn, prefix), *shown[1:]]
        files |= {f"{prefix}{table.key}.csv": table.csv() for table in own}
        files |= {f"{prefix}{name}.png": picture for name, picture in drawn.items()}
    between = [table for table in several if table.records]
    drawn = figures.of_several(runs) if drawable else {}
    heading, what = "Between runs, and the papers", "Targets beside each other, and as printed."
    sections.append(Section(heading, what, between, drawn))
    text += [f"## {heading}", "", what, "", *_pictures(drawn, "")]
    text += [table.markdown() for table in between]
    files |= {f"{name}.png": picture for name, picture in drawn.items()}
    files |= {f"{table.key}.csv": table.csv() for table in between}
    files["report.md"] = "\n".join(text)
    files["report.html"] = page(title, note, sections)
    files["report.json"] = json.dumps(report_of(runs), indent=1, allow_nan=False) + "\n"
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def _several(runs: Sequence[Saved]) -> list[Table]:
    return [*tables.of_several(runs), tables.as_printed()]


def _pictures(drawn: Mapping[str, bytes], prefix: str) -> list[str]:
    return [f"![{caption_of(name)}]({prefix}{name}.png)\n" for name in drawn]


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)


def summary(one: Saved) -> str:
    """What was measured, on what, and how much of it."""
    about: Mapping[str, Any] = one.about
    machine, settings, target = about["machine"], about["settings"], one.target
    versions = about.get("versions") or machine
    size = target.get("parameters")
    counted = sum(len(turns) for turns in one.turns.values())
    failed = sum(len(turns) for turns in one.failed.values())
    questions = len({turn.question_id for turn in one.lines})
    batch = settings.get("batch", 1)  # which the first runs do not tell
    together = f"{batch} of them in a call, " if batch > 1 else ""
    words = [
        f"Target: {one.target_name}"
        + (f", {size / 1e6:.0f} million parameters" if size else "")
        + f", {str(target.get('dtype', '')).removeprefix('torch.')}.",
        f"{machine.get('device_name')}, threads: {machine.get('threads')} on "
        f"{machine.get('cores')} cores, torch {versions.get('torch')}.",
        f"{questions} questions of {settings.get('questions')}, temperature "
        f"{one.temperature:g}, up to {settings.get('max_new_tokens')} new tokens, "
        f"{together}repeats in turns: {settings.get('repeats')}; "
        f"{counted} turns measured, {failed} failed.",
        f"Begun {about.get('created')}, commit {about.get('commit')}"
        + ("." if not about.get("dirty") else " with local changes."),
    ]
    words += _spent(about.get("seconds") or [])
    expected = _expected(one)
    if expected is not None and counted + failed < expected:
        words.append(f"NOT FINISHED: {counted + failed} of {expected} turns.")
    return " ".join(words)


def _spent(sessions: Sequence[Mapping[str, float]]) -> list[str]:
    """What preparation and turns took, in words; the sum of a run's sessions. One that was killed
    does not tell of its turns."""
    if not sessions:
        return []
    sums: dict[str, float] = {}
    for session in sessions:
        for what, seconds in session.items():
            sums[what] = sums.get(what, 0.0) + seconds
    turns = sums.pop("turns", 0.0)
    parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in sums.items())
    words = f"Preparation: {sum(sums.values()):.0f} s ({parts})"
    if all("turns" in session for session in sessions):
        whole = (sum(sums.values()) + turns) / 60
        words += f"; turns: {turns:.0f} s; in all {whole:.1f} minutes"
    return [words + (f", in {len(sessions)} sessions." if len(sessions) > 1 else ".")]


def _expected(one: Saved) -> int | None:
    """Turns of all methods and repeats, where the settings tell."""
    settings = one.about["settings"]
    turns, repeats = settings.get("turns"), settings.get("repeats")
    return None if turns is None or repeats is None else turns * repeats * len(one.methods)


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
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The subcommand."""
    runs = load(args.runs)
    if args.output is None and len(runs) > 1:
        raise ValueError(f"output: expected a folder for {len(runs)} runs, given none")
    folder = args.runs[0] if args.output is None else Path(args.output)
    if not plot.available():
        print(plot.MISSING)
    written = write(runs, folder)
    for one in runs:
        print(f"# {one.label}\n\n{tables.overall(one).markdown()}")
    print(f"{len(written)} files in {folder}: report.html, report.md, report.json, CSV, PNG")
    return 0
