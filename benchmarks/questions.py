"""Questions and their prompts: Spec-Bench's (Xia et al. 2024), six tasks of 80 questions
(MT-bench's with two turns); GSM8K's; any file of prompts; or a few packaged questions."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyspec_ext import tiny
from polyspec_ext.chat import has_template

# Optional test splits beside the repository.
_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GSM8K, SPEC_BENCH = _DATA / "gsm8k_test.jsonl", _DATA / "spec_bench_question.jsonl"
TASKS = ("mt_bench", "translation", "summarization", "qa", "math", "rag")
OTHER = "other"  # task of questions without a category of Spec-Bench's
OVERALL = "overall"
_NAMES = ("MT-bench", "Translation", "Summarisation", "QA", "Math", "RAG", "Other", "Overall")
TASK_NAMES = dict(zip((*TASKS, OTHER, OVERALL), _NAMES, strict=True))
_MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
# "math" is a category of MT-bench; the math task has the category "math_reasoning".
_TASK_OF = {
    **{name: name for name in TASKS},
    **dict.fromkeys(_MT_BENCH, "mt_bench"),
    "math_reasoning": "math",
}
# Keys of a line's prompt, a text or the texts of several turns, in this order.
_TEXTS = ("turns", "prompt", "question", "instruction")


@dataclass(frozen=True)
class Question:
    """A line of a file of questions."""

    question_id: Any  # as in the file; default: the line number
    category: str
    turns: tuple[str, ...]  # the user's texts, one after another

    @property
    def task(self) -> str:
        """Name of `TASKS`, or `OTHER`."""
        return _TASK_OF.get(self.category, OTHER)


PACKAGED = Path(__file__).with_suffix(".jsonl")  # a few questions


def default_path() -> Path:
    """Return Spec-Bench's file, where it lies beside the repository, else `PACKAGED`."""
    return SPEC_BENCH if SPEC_BENCH.is_file() else PACKAGED


def read(path: Path | None = None) -> list[Question]:
    """Return all questions of a file of JSON lines; None: of `default_path`."""
    path = path or default_path()
    if path == GSM8K and not path.is_file():
        where = f"expected {path.name} in {path.parent}, given none there"
        raise ValueError(f"--questions: {where}; docs/benchmarks.md fetches it")
    by_id: dict[Any, Question] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            question = _question(line, f"--questions: {path}: line {number}:", number)
            if by_id.setdefault(question.question_id, question) is not question:
                expected = f"expected each question_id once in {path}"
                raise ValueError(f"--questions: {expected}, given {question.question_id}")
    if not by_id:
        raise ValueError(f"--questions: expected questions in {path}, given none")
    return list(by_id.values())


def _question(line: str, where: str, number: int) -> Question:
    try:
        fields = json.loads(line)
        key = next(key for key in _TEXTS if key in fields)
        turns = [fields[key]] if isinstance(fields[key], str) else fields[key]
    except (ValueError, TypeError, StopIteration):
        keys = ", ".join(f'"{key}"' for key in _TEXTS)
        raise ValueError(f"{where} expected JSON with one of {keys}, given {line[:40]!r}") from None
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise ValueError(f'{where} expected "{key}" to be a text or texts, given {turns!r}')
    # GSM8K's lines have no category.
    category = fields.get("category", "math_reasoning" if key == "question" else OTHER)
    return Question(fields.get("question_id", number), category, tuple(turns))


def select(questions: Sequence[Question], per_task: int) -> list[Question]:
    """Return `per_task` questions of every task, the tasks in turns, and a task's categories each
    in turn, so that a run that ends early has some of each."""

    def in_turns(kinds: Sequence[Sequence[Question]]) -> list[Question]:
        return [question for row in itertools.zip_longest(*kinds) for question in row if question]

    chosen = []
    for task in (*TASKS, OTHER):
        kinds: dict[str, list[Question]] = {}
        for question in questions:
            if question.task == task:
                kinds.setdefault(question.category, []).append(question)
        chosen.append(in_turns(list(kinds.values()))[:per_task])
    return in_turns(chosen)


def digest(questions: Sequence[Question]) -> str:
    """Return a text that differs between sets of questions."""
    text = json.dumps([[q.question_id, q.category, q.turns] for q in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# The system message of FastChat's vicuna_v1.1, with which the Vicuna models were trained.
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
AUTO, CHAT = "auto", "chat"


# Beginning of a text, a question in it, and the reply, from an answer and the EOS. The template of
# the tokenizer includes the BOS; for these the tokenizer adds it.
TEMPLATES: dict[str, tuple[str, Callable[[str], str], Callable[[str, str], str]]] = {
    # A reply ends with the EOS, and no space follows it.
    "vicuna": (f"{_VICUNA} ", "USER: {} ASSISTANT:".format, " {}{}".format),
    "tiny": ("", tiny.prompt_of, lambda answer, eos: f" {answer}\n\n" if answer else ""),
    "plain": ("", str, lambda answer, eos: f"\n\n{answer}\n\n" if answer else "\n\n"),
}


class Conversation:
    """Prompts by a template of `TEMPLATES`, "chat", the target's tokenizer's, or "auto": "chat" if
    there is one, else "plain". A prompt longer than `room` tokens loses its middle; its beginning
    stays, and its end, which has the instruction."""

    def __init__(self, tokenizer: Any, template: str, room: int) -> None:
        has = has_template(tokenizer)
        if template == AUTO:
            template = CHAT if has else "plain"
        if room < 2:
            expected = "expected to leave room for a prompt in the models' contexts"
            raise ValueError(f"--max-new-tokens: {expected}, given room for {room} tokens")
        self.tokenizer, self.template, self.room = tokenizer, template, room

    def text(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """Return the text before the next answer; `answers`: to all turns but the last."""
        if self.template == CHAT:
            texts = itertools.chain.from_iterable(itertools.zip_longest(turns, answers))
            pairs = zip(itertools.cycle(("user", "assistant")), texts, strict=False)
            messages = [{"role": role, "content": text} for role, text in pairs if text is not None]
            apply = self.tokenizer.apply_chat_template
            return str(apply(messages, tokenize=False, add_generation_prompt=True))
        text, ask, reply = TEMPLATES[self.template]
        replies = [*(reply(answer, self.tokenizer.eos_token) for answer in answers), ""]
        return text + "".join(ask(turn) + said for turn, said in zip(turns, replies, strict=True))

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Return the ids of `text`, at most `room`."""
        text, special = self.text(turns, answers), self.template != CHAT
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        if len(ids) <= self.room:
            return ids
        front = self.room // 2
        return [*ids[:front], *ids[len(ids) - (self.room - front) :]]

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer for later prompts."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
