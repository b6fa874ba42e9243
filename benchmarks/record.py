"""A run in its folder: ``run.json`` has settings, models and machine, ``turns.jsonl`` a line per
question, turn and method, written after its measurement.

Numbers are counted alike for every method: new tokens up to and including the EOS, seconds of the
whole call by the wall clock, prefill included. A line has these keys:

- ``question_id``, ``turn``, ``method``: key of the line; ``category``, ``task``.
- ``status``: "ok" or "failed"; a failed turn has its ``error`` and no numbers.
- ``seconds``: of the call, including ``prefill_seconds`` (null if the method does not report
  them); earlier runs have a ``batch`` of questions in a call, and a row's share.
- ``prompt_tokens``, ``new_tokens``, ``tokens`` (ids).
- ``levels``, target first: ``name``; ``passes`` while decoding; ``seconds``; ``accepted``,
  tokens of each verification in order, empty for a drafter.
- ``lossless``: `measuring.compared` with the baseline's text of the same prompt; null: not
  comparable.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyspec_ext.files import replace_text

SCHEMA = 1  # of both files
FACTS, TURNS = "run.json", "turns.jsonl"
OK, FAILED = "ok", "failed"
# Facts that must be the same when a run is continued.
SAME = ("schema", "command", "settings", "models", "machine", "versions")

Turn = dict[str, Any]
key_of = operator.itemgetter("question_id", "turn", "method")  # the key of a line


def read_facts(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` of a folder."""
    path = folder / FACTS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the {FACTS} of a run, given none")
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if facts.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected schema {SCHEMA}, given {facts.get('schema')}")
    return facts


def read_turns(folder: Path) -> list[Turn]:
    """Return the lines of a folder without a partial last line."""
    path = folder / TURNS
    if not path.is_file():
        return []
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    turns: list[Turn] = list(map(json.loads, lines))
    with contextlib.suppress(ValueError):  # without an end of line: killed while writing
        turns.append(json.loads(last))
    return turns


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return the differences between the facts of a run and the current facts, in words; without a
    `name`, of the keys of `SAME` alone."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{name}: {before!r} there, {now!r} now"]
    keys = sorted({*before, *now}) if name else SAME
    return [
        line
        for key in keys
        for line in differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    ]


class TurnWriter:
    """Writer of a run: its facts, then turn after turn, each on the disk before the next begins. A
    run in the folder is continued."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        replace_text(folder / FACTS, text)
        self.turns = read_turns(folder)
        lines = (json.dumps(turn, allow_nan=False) + "\n" for turn in self.turns)
        replace_text(folder / TURNS, "".join(lines))  # without a partial last line

    def add(self, turn: Turn) -> None:
        """Append a line."""
        with (self.folder / TURNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(turn, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.turns.append(turn)
