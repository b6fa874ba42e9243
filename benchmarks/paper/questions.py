"""Questions: Spec-Bench's (Xia et al. 2024), six tasks of 80, of which MT-bench's have two turns;
GSM8K's, of which one of the tasks is made; those of any file of prompts; or the few here."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from polyspec_ext import tiny

GSM8K_URL = (
    "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
    "test.jsonl"
)
# Where it lies beside the repository.
SPEC_BENCH = machine.GSM8K.with_name("spec_bench_question.jsonl")
TASKS = ("mt_bench", "translation", "summarization", "qa", "math", "rag")
MT_BENCH = TASKS[0]
OTHER = "other"  # task of questions without a category, or with one that Spec-Bench does not have
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


# Keys of a line's prompt, a text or the texts of several turns, in the order they are looked for.
_TEXTS = ("turns", "prompt", "question", "instruction")


@dataclass(frozen=True)
class Question:
    """A line of a file of questions.

    Attributes:
        question_id: as the file has it; the number of the line where it has none.
        category: as the file has it.
        turns: what the user says, one after another.
    """

    question_id: Any
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """Return a name of `TASKS`, or `OTHER`."""
        return _TASK_OF.get(self.category, OTHER)


_TEA = "Tea leaves are picked, withered, rolled, oxidised and dried. Green tea is not oxidised. "
_BRIDGE = (
    "The old bridge over the Lenne was closed on Monday. Engineers had found cracks in two of its "
    "five piers. The city plans to repair them until autumn; buses take the northern road. "
)
PACKAGED = tuple(
    Question(number, category, tuple(turns))
    for number, (category, *turns) in enumerate(
        [
            ("writing", "Write a short letter that invites a friend to a walk by the sea.",
             "Make it half as long."),
            ("translation", "Translate into German: The train to the coast leaves at nine."),
            ("summarization", f"Summarize in one sentence: {_BRIDGE}"),
            ("qa", "Why does ice float on water?"),
            ("math_reasoning", tiny.QUESTIONS[0]),
            ("rag", f"{_TEA}\nBy this text, which step is left out for green tea?"),
            ("coding", "Write a Python function that returns the second largest of some numbers.",
             "Now without sorting them."),
            ("translation", "Translate into French: We have not seen the letter yet."),
            ("summarization", f"Give the main points as a list: {_TEA}"),
            ("qa", "Which planet has the shortest year, and why?"),
            ("math_reasoning", tiny.QUESTIONS[1]),
            ("rag", f"{_BRIDGE}\nBy this text, how many piers have no cracks?"),
        ],
        1,
    )
)  # fmt: skip


def default_place() -> Path | None:
    """Return Spec-Bench's file, where it lies beside the repository."""
    return SPEC_BENCH if SPEC_BENCH.is_file() else None


def read(place: Path | None = None) -> list[Question]:
    """Return all questions of a file.

    Args:
        place: JSON lines, each with "turns", "prompt", "question" or "instruction", a text or
            several. None: `default_place`, else `PACKAGED`.

    Raises:
        ValueError: no such file, or a line in it has no prompt; names it.
    """
    if place is None:
        place = default_place()
    if place is None:
        return list(PACKAGED)
    if place == machine.GSM8K and not place.is_file():
        raise ValueError(
            f"--questions: expected {place.name} in {place.parent}, given none there; fetch it: "
            f"curl -L --create-dirs -o {place} {GSM8K_URL}"
        )
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
        key = next(key for key in _TEXTS if key in given)
        turns = given[key]
    except (ValueError, TypeError, StopIteration):
        wanted = ", ".join(f'"{key}"' for key in _TEXTS)
        raise ValueError(
            f"{where} expected JSON with one of {wanted}, given {line[:40]!r}"
        ) from None
    turns = [turns] if isinstance(turns, str) else turns
    if not (isinstance(turns, list) and turns and all(isinstance(one, str) for one in turns)):
        raise ValueError(
            f'{where} expected "{key}" to be a text or a list of texts, given {turns!r}'
        )
    # GSM8K's lines have no category.
    category = given.get("category", "math_reasoning" if key == "question" else OTHER)
    if not isinstance(category, str):
        raise ValueError(f'{where} expected "category" to be a word, given {category!r}')
    question_id = given.get("question_id", number)
    if not isinstance(question_id, int | str):
        raise ValueError(f'{where} expected "question_id" to be a number, given {question_id!r}')
    return Question(question_id, category, tuple(turns))


def select(questions: Sequence[Question], per_task: int) -> list[Question]:
    """`per_task` questions of every task that has any, the tasks in turns, so that a run that ends
    early has some of each. Of a task's categories each gives one in turn."""
    chosen = []
    for task in (*TASKS, OTHER):
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
