"""Questions of ``paper``, templates against transformers' rendering, and prompts that are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as entry
from benchmarks import questions
from benchmarks.questions import Conversation, Question
from polyspec_ext import tiny

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS, ANSWERS = ["Who?", "And then?", "Why?"], ["Nobody.", "Nothing."]


@pytest.fixture
def tokenizer() -> Any:
    return tiny.tokenizer()


def test_the_chat_template_is_rendered_as_transformers_does(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    made = Conversation(tokenizer, "auto", 500)
    assert made.template == "chat"
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Nobody."},
        {"role": "user", "content": "And then?"},
    ]
    theirs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    ours = made.prompt(TURNS[:2], ANSWERS[:1])
    assert ours == list(theirs)
    # One BOS, which is the template's.
    assert ours.count(tokenizer.bos_token_id) == 1


def test_other_templates(tokenizer: Any) -> None:
    vicuna = Conversation(tokenizer, "vicuna", 500)
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    end = tokenizer.eos_token
    assert vicuna.text(TURNS, ANSWERS) == (
        f"{system} USER: Who? ASSISTANT: Nobody.{end}USER: And then? ASSISTANT: Nothing.{end}"
        "USER: Why? ASSISTANT:"
    )
    ids = vicuna.prompt(TURNS, ANSWERS)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == 2
    made = Conversation(tokenizer, "tiny", 500)
    assert made.prompt(TURNS[:1], []) == tokenizer(tiny.prompt_of("Who?")).input_ids
    assert made.text(TURNS[:2], ANSWERS[:1]) == (
        "Question: Who?\nAnswer: Nobody.\n\nQuestion: And then?\nAnswer:"
    )
    answer = tokenizer(" Nobody.\n", add_special_tokens=False).input_ids
    assert made.answer([*answer, tokenizer.eos_token_id]) == "Nobody."
    tokenizer.chat_template = None  # turns are paragraphs
    plain = Conversation(tokenizer, "auto", 500)
    assert plain.text(TURNS[:2], ANSWERS[:1]) == "Who?\n\nNobody.\n\nAnd then?"


@pytest.mark.parametrize("room", [20, 21])
def test_of_a_prompt_that_is_too_long_the_middle_is_left_out(tokenizer: Any, room: int) -> None:
    text = [" ".join(str(n) for n in range(40))]
    whole = Conversation(tokenizer, "tiny", 500).prompt(text, [])
    cut = Conversation(tokenizer, "tiny", room).prompt(text, [])
    assert (len(cut), len(whole) > room) == (room, True)
    assert cut == whole[: room // 2] + whole[-(room - room // 2) :]
    assert Conversation(tokenizer, "tiny", len(whole)).prompt(text, []) == whole


def test_a_prompt_needs_room(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="--max-new-tokens: expected to leave room"):
        Conversation(tokenizer, "tiny", -10)


def test_the_six_tasks_in_turns() -> None:
    kinds = [*["writing"] * 3, *["math"] * 2, "qa", "qa", "rag", "math_reasoning"]
    made = [Question(n, kind, ("?",)) for n, kind in enumerate(kinds)]
    some = questions.select(made, 3)
    assert [(one.task, one.question_id) for one in some] == [
        ("mt_bench", 0), ("qa", 5), ("math", 8), ("rag", 7),
        ("mt_bench", 3), ("qa", 6), ("mt_bench", 1),
    ]  # fmt: skip
    assert questions.digest(some) == questions.digest(questions.select(made, 3))
    assert questions.digest(some) != questions.digest(some[1:])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "line 2: expected JSON with"),
        ('{"question_id": 1, "text": ["a"]}', "line 2: expected JSON with one of"),
        ("[1]", "line 2: expected JSON with"),
        ('"question"', "line 2: expected JSON with"),
        ('{"question": 7}', '"question" to be a text or texts'),
        ('{"prompt": [{"role": "user"}]}', '"prompt" to be a text or texts'),
        ('{"question_id": 1, "category": "qa", "turns": []}', '"turns" to be a text or texts'),
        ('{"question_id": 0, "category": "qa", "turns": ["a"]}', "each question_id once"),
    ],
)
def test_lines_that_are_no_questions(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "question.jsonl"
    good = json.dumps({"question_id": 0, "category": "qa", "turns": ["a"]})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="--questions: ") as error:
        questions.read(path)
    assert wrong in str(error.value)
    path.write_text("\n")
    with pytest.raises(ValueError, match="expected questions in"):
        questions.read(path)


def test_prompts_of_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GSM8K's lines have no number and no category: they are of one task."""
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"task_id": "HumanEval/0", "prompt": "def add(a, b):"},
        {"prompt": ["Who?", "Why?"], "category": "history", "question_id": "h1"},
        {"instruction": "Translate.", "category": "translation", "output": "x"},
        {"question": "a?", "answer": "1"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = questions.read(path)
    assert [(one.question_id, one.task, one.turns) for one in found] == [
        (1, "other", ("def add(a, b):",)),
        ("h1", "other", ("Who?", "Why?")),
        (3, "translation", ("Translate.",)),
        (4, "math", ("a?",)),
    ]
    assert questions.select(found, 5) == [found[2], found[3], found[0], found[1]]
    parse = entry.make_parser().parse_args
    monkeypatch.setattr(questions, "GSM8K", path)
    assert parse(["paper", "--questions", "gsm8k"]).questions == path
    monkeypatch.setattr(questions, "GSM8K", tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"none\.jsonl .* docs/benchmarks.md fetches it"):
        questions.read(parse(["paper", "--questions", "gsm8k"]).questions)
    # A clone has the shipped questions.
    monkeypatch.setattr(questions, "SPEC_BENCH", tmp_path / "none.jsonl")
    few = questions.read()
    assert {one.task for one in few} == set(questions.TASKS)
    assert len({one.question_id for one in few}) == len(few) == 24
