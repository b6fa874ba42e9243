"""Spec-Bench's questions (Xia et al. 2024): six tasks of 80, of which MT-bench's have two turns; or
GSM8K's, of which one of the tasks is made."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyspec_ext.bench import machine

# Where it lies beside the repository.
SPEC_BENCH = machine.GSM8K.with_name("spec_bench_question.jsonl")
TASKS = ("mt_bench", "translation", "summarization", "qa", "math", "rag")
MT_BENCH = TASKS[0]
# "math" is one of MT-bench's categories; the task of that name is called "math_reasoning" there.
_TASK_OF = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        MT_BENCH,
    ),
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}


@dataclass(frozen=True)
class Question:
    """One line of question.jsonl, or of GSM8K.

    Attributes:
        question_id: as it stands there; the number of the line where none does.
        category: as it stands there.
        turns: what the user says, one after another.
    """

    question_id: Any
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """One of `TASKS`."""
        return _TASK_OF[self.category]


def read(place: Path | None = None) -> list[Question]:
    """All questions of a file.

    Args:
        place: None: Spec-Bench's, where it lies beside the repository.

    Raises:
        ValueError: no such file, or a line in it is none of Spec-Bench's; names it.
    """
    if place == machine.GSM8K and not place.is_file():
        raise ValueError(
            f"--questions: expected {place.name} (github.com/openai/grade-school-math) in "
            f"{place.parent}, given none there"
        )
    if place is None:
        if not SPEC_BENCH.is_file():
            raise ValueError(
                "--questions: expected Spec-Bench's question.jsonl (github.com/hemingkx/Spec-Bench,"
                " data/spec_bench), given none, and none lies beside the repository"
            )
        place = SPEC_BENCH
    lines = place.read_text(encoding="utf-8").splitlines()
    found = [_question(line, place, n) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"--questions: expected questions in {place}, given none")
    ids = [question.question_id for question in found]
    twice = next((one for n, one in enumerate(ids) if one in ids[:n]), None)
    if twice is not None:
        raise ValueError(f"--questions: expected each question_id once in {place}, given {twice}")
    return found


def _question(line: str, place: Path, number: int) -> Question:
    where = f"--questions: {place}: line {number}:"
    try:
        given = json.loads(line)
        if "question" in given and "turns" not in given:
            given = {
                "question_id": number, "category": "math_reasoning", "turns": [given["question"]]
            }  # fmt: skip
        question_id, category, turns = given["question_id"], given["category"], given["turns"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f'{where} expected JSON with "question_id", "category" and "turns", given {line[:40]!r}'
        ) from None
    if category not in _TASK_OF:
        known = ", ".join(_TASK_OF)
        raise ValueError(f'{where} expected "category" to be one of {known}, given {category!r}')
    if not isinstance(question_id, int | str):
        raise ValueError(f'{where} expected "question_id" to be a number, given {question_id!r}')
    texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
    if not turns or not texts:
        raise ValueError(f'{where} expected "turns" to be a list of texts, given {turns!r}')
    return Question(question_id, category, tuple(turns))


def select(questions: Sequence[Question], per_task: int) -> list[Question]:
    """`per_task` questions of every task that has any, the tasks in turns, so that a run that ends
    early has some of each. Of a task's categories each gives one in turn."""
    chosen = []
    for task in TASKS:
        kinds: dict[str, list[Question]] = {}
        for question in questions:
            if question.task == task:
                kinds.setdefault(question.category, []).append(question)
        own = [one for row in itertools.zip_longest(*kinds.values()) for one in row if one]
        chosen.append(own[:per_task])
    return [one for row in itertools.zip_longest(*chosen) for one in row if one]


def batches(questions: Sequence[Question], size: int) -> list[list[int]]:
    """Places of the questions that are answered together, `size` at most, in their order; all of a
    batch have the same number of turns."""
    places: dict[int, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(len(question.turns), []).append(place)
    return sorted(
        alike[at : at + size] for alike in places.values() for at in range(0, len(alike), size)
    )


def digest(questions: Sequence[Question]) -> str:
    """Tells sets of questions apart."""
    text = json.dumps([[one.question_id, one.category, one.turns] for one in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
