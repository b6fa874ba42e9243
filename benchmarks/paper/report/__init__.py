"""``report``: the papers' tables and figures from saved runs (`bench.paper.record`), as
Markdown, CSV, JSON, PNG and one static page.

Runs stand beside each other: every run has tables of its own, and only the overview shows repeats
of the same models and settings in one table, a column each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import output, plot
from polyspec_ext.cli import options

from ..record import read_run
from . import figures, tables
from .page import Section, page
from .saved import Saved

SCHEMA = 1  # of report.json
_FACTS = (
    "created", "command", "commit", "dirty", "machine", "load", "seconds", "versions", "settings",
    "models", "methods",
)  # fmt: skip
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
    runs = [Saved(label, read_run(place)) for label, place in zip(labels, places, strict=True)]
    for run, place in zip(runs, places, strict=True):
        if not run.lines:
            raise ValueError(f"RUN: expected a run with turns, given {place} without any")
    return runs


def report_of(runs: Sequence[Saved]) -> dict[str, Any]:
    """Every table's records, as report.json has them."""
    return {
        "schema": SCHEMA,
        "command": "bench report",
        "several": {table.key: table.data() for table in tables.of_several(runs)},
        "runs": [
            {
                "label": one.label,
                **_facts(one),
                "tables": {table.key: table.data() for table in tables.of_run(one)},
            }
            for one in runs
        ],
    }


def _facts(run: Saved) -> dict[str, Any]:
    """What of run.json is shown as it is."""
    return {name: run.about[name] for name in _FACTS if name in run.about}


def write(runs: Sequence[Saved], folder: Path) -> list[Path]:
    """Writes report.md, report.json, report.html, and a CSV file per table and a PNG file per
    figure (without matplotlib, none); gives the files."""
    sections = []
    for one in runs:
        prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", one.label) + "-" if len(runs) > 1 else ""
        facts = json.dumps(_facts(one), indent=1, ensure_ascii=False)
        drawn = figures.of_run(one)
        sections.append(Section(one.label, summary(one), tables.of_run(one), drawn, facts, prefix))
    note = "Targets beside each other, and as printed."
    drawn = figures.of_several(runs)
    several = Section("Between runs, and the papers", note, tables.of_several(runs), drawn)
    sections.append(several)
    title = "Benchmark report: " + ", ".join(dict.fromkeys(run.target_name for run in runs))
    note = (
        "What is slower than plain decoding is shown like the rest, in red on the page."
        + " Nothing of one run enters another's numbers." * (len(runs) > 1)
    )
    files: dict[str, str | bytes] = {}
    text = [f"# {title}", "", note, ""]
    for section in sections:
        text += section.markdown()
        files |= {f"{section.prefix}{table.key}.csv": table.csv() for table in section.tables}
        files |= {f"{section.prefix}{name}.png": data for name, data in section.figures.items()}
    files["report.md"] = "\n".join(text)
    files["report.html"] = page(title, note, sections)
    files["report.json"] = json.dumps(report_of(runs), indent=1, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def summary(run: Saved) -> str:
    """What was measured, on what, and how much of it."""
    about, target = run.about, run.target
    machine, settings = about["machine"], about["settings"]
    done = len(run.lines)
    batch = settings.get("batch", 1)  # which the first runs do not tell
    together = f"{batch} of them in a call, " if batch > 1 else ""
    words = [
        f"Target: {run.target_name}, {target['parameters'] / 1e6:.0f} million parameters, "
        f"{target['dtype']}.",
        f"{machine['device_name']}, threads: {machine['threads']} on "
        f"{machine['cores']} cores, torch {about['versions']['torch']}.",
        f"{len({turn.question_id for turn in run.lines})} questions of {settings['questions']}, "
        f"temperature {run.temperature:g}, up to {settings['max_new_tokens']} new tokens, "
        f"{together}repeats in turns: {settings['repeats']}; "
        f"{done - len(run.failed)} turns measured, {len(run.failed)} failed.",
        f"Begun {about['created']}, commit {about['commit']}"
        + (" with local changes." if about.get("dirty") else "."),
        *_spent(about.get("seconds")),
    ]
    expected = settings["turns"] * settings["repeats"] * len(run.methods)
    if done < expected:
        words.append(f"NOT FINISHED: {done} of {expected} turns.")
    return " ".join(words)


def _spent(sessions: Sequence[Mapping[str, float]] | None) -> list[str]:
    """What preparation and turns took, in words; the sum of a run's sessions. One that was killed
    does not tell of its turns."""
    if not sessions:
        return []
    sums: Counter[str] = Counter()
    for session in sessions:
        sums.update(session)
    turns = sums.pop("turns", 0.0)
    parts = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in sums.items())
    words = f"Preparation: {sum(sums.values()):.0f} s ({parts})"
    if all("turns" in session for session in sessions):
        whole = (sum(sums.values()) + turns) / 60
        words += f"; turns: {turns:.0f} s; in all {whole:.1f} minutes"
    return [words + (f", in {len(sessions)} sessions." if len(sessions) > 1 else ".")]


def add_command(kinds: Any) -> None:
    """Adds ``report`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "report",
        help="the papers' tables and figures from saved runs",
        description="Draws the report of saved runs of `paper` anew, beside what the papers "
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
        output.show(f"# {one.label}\n\n{tables.overall(one).markdown()}")
    print(f"{len(written)} files in {folder}: report.html, report.md, report.json, CSV, PNG")
    return 0
