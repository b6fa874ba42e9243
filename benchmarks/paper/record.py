"""A run in its folder: ``run.json`` says what was measured and on what, ``turns.jsonl`` has a line
per question, turn, method and repeat, written as it is measured.

Numbers are counted alike for every method: new tokens up to and including the EOS, seconds of the
whole call by the wall clock, prefill included. Where a call answers several questions each of them
has its share of the seconds, so that tokens over seconds are those of the batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from polyspec_ext.files import replace_text

SCHEMA = 1  # of both files
FACTS, TURNS = "run.json", "turns.jsonl"
OK, FAILED = "ok", "failed"
EOS, LENGTH = "eos", "length"
# What must be the same where a run goes on.
SAME = ("schema", "command", "settings", "models", "machine", "versions")

Key = tuple[Any, int, str, int]  # question_id, turn, method, repeat


@dataclass(frozen=True)
class LevelTurn:
    """What one level did in a turn.

    Attributes:
        passes: forward passes while decoding, those of the whole batch.
        seconds: of decoding spent in it, a row's share.
        accepted: tokens that each of its verifications handed up or committed, correction or bonus
            included, in order; empty for a drafter.
    """

    name: str
    passes: int
    seconds: float
    accepted: list[int]


@dataclass(frozen=True)
class Turn:
    """One line of ``turns.jsonl``.

    Attributes:
        category: as the questions have it; `task` is one of the six that it belongs to.
        turn, repeat: from 0.
        method: key of the method.
        status: "ok" or "failed"; of a failed turn `error` says why, and there are no numbers.
        batch: questions that the call answered.
        seconds: of the whole call, over `batch`: a row's share; `prefill_seconds` of it: None where
            the method does not tell.
        ended: "eos" or "length".
        levels: target first; empty for transformers' own generation.
        tokens: new ids, the EOS included.
        lossless: greedy: ``identical`` to the baseline's text of the same prompt, else ``at`` which
            token it parts from it, and the ``gap`` of the target's two largest logits there.
            Sampled: ``surprise`` and ``variance`` (`bench.differences.surprise`). None where it
            cannot be said.
        cut: tokens of the prompt before its middle was left out; None: it is whole.
    """

    question_id: Any
    category: str
    task: str
    turn: int
    method: str
    repeat: int
    status: str
    error: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    seconds: float | None = None
    prefill_seconds: float | None = None
    ended: str | None = None
    levels: list[LevelTurn] = field(default_factory=list)
    tokens: list[int] | None = None
    lossless: dict[str, Any] | None = None
    cut: int | None = None
    batch: int = 1

    @property
    def key(self) -> Key:
        """What tells turns of a run apart."""
        return self.question_id, self.turn, self.method, self.repeat

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def decode_seconds(self) -> float | None:
        """Behind the prefill; None where the method does not tell."""
        if self.seconds is None or self.prefill_seconds is None:
            return None
        return self.seconds - self.prefill_seconds


class Run(NamedTuple):
    """A run as it lies in its folder.

    Attributes:
        facts: of ``run.json``.
        turns: in the order in which they were measured.
    """

    facts: dict[str, Any]
    turns: list[Turn]


def read_run(folder: str | Path) -> Run:
    """A run, finished or not.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is none of a run; names it, and the line.
    """
    return Run(read_facts(folder), read_turns(folder))


def read_facts(folder: str | Path) -> dict[str, Any]:
    """``run.json`` of a folder. Errors are those of `read_run`."""
    place = Path(folder) / FACTS
    if not place.is_file():
        raise FileNotFoundError(f"{place}: expected the {FACTS} of a run, given none")
    try:
        facts = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON: {error}") from error
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{place}: expected schema {SCHEMA}, given {schema}")
    found: dict[str, Any] = facts
    return found


def read_turns(folder: str | Path) -> list[Turn]:
    """The turns of a folder, without a last line that is half written. Errors are those of
    `read_run`."""
    place = Path(folder) / TURNS
    if not place.is_file():
        return []
    found, seen = [], set()
    lines = place.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = _turn(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # it has no end of line: the run was killed while writing
                break
            raise ValueError(
                f"{place}: line {number}: expected a turn, given {line[:40]!r}"
            ) from error
        if turn.key in seen:
            raise ValueError(f"{place}: line {number}: expected {turn.key} once, given it again")
        seen.add(turn.key)
        found.append(turn)
    return found


def _turn(given: Mapping[str, Any]) -> Turn:
    levels = [LevelTurn(**level) for level in given["levels"]]
    return Turn(**{**given, "levels": levels})


def differences(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What of a run that is to go on is not as it was, in words; methods by their keys alone."""
    return [line for name in SAME for line in _compared(name, facts.get(name), wanted.get(name))]


def _compared(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*before, *now})
            for line in _compared(f"{name}.{key}", before.get(key), now.get(key))
        ]
    return [] if before == now else [f"{name}: {before!r} there, {now!r} now"]


class TurnWriter:
    """Writes a run: its facts once, then turn after turn, each on the disk before the next begins.

    Args:
        folder: made where it is not there. With a ``run.json`` in it the run goes on.
        facts: of a new run; of one that goes on they are as `read_facts` gave them.
    """

    def __init__(self, folder: str | Path, facts: Mapping[str, Any]) -> None:
        self.folder, self.facts = Path(folder), dict(facts)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note({})
        self.turns = read_turns(self.folder)
        # Without a last line that is half written.
        replace_text(self.folder / TURNS, "".join(map(_line, self.turns)))

    def add(self, turn: Turn) -> None:
        """Appends a line."""
        with (self.folder / TURNS).open("a", encoding="utf-8") as file:
            file.write(_line(turn))
            file.flush()
            os.fsync(file.fileno())
        self.turns.append(turn)

    def note(self, more: Mapping[str, Any]) -> None:
        """Adds to ``run.json``, which is written whole or not at all."""
        self.facts |= more
        text = json.dumps(self.facts, indent=1, allow_nan=False) + "\n"
        replace_text(self.folder / FACTS, text)


def _line(turn: Turn) -> str:
    return json.dumps(asdict(turn), allow_nan=False) + "\n"
