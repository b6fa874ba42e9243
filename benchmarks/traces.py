"""Recorded acceptance: which tokens of greedy texts each shipped level would have proposed, and how
long its passes take. Whatever windows a chain has, its rounds along these texts can be replayed
exactly (`replay`).

Texts at even places of a set are for tuning: whatever is chosen by looking at numbers, such as the
policies' defaults, is chosen on them. Those at odd places are held out, and reports are about them.

At temperature 0 the target's text does not depend on the chain (contract C5), a token is accepted
where it is the argmax of the level above, and what the middle level hands up is its own greedy
continuation of the text. So all that decides a round is, at each position, whether the middle's
argmax is the target's and whether the drafter's is the middle's; behind a token of the middle that
the target rejects, the drafter goes on along the middle's own continuation, which is recorded too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from polyspec_ext import progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.levels import load_model
from polyspec_ext.tuning import pass_seconds

BRANCH = 24  # tokens that are recorded behind a rejected one
TUNING, HELD_OUT = "tuning", "held-out"


@dataclass(frozen=True)
class Text:
    """One greedy text, by position of its new tokens."""

    prompt: list[int]
    tokens: list[int]  # the new ones
    drafter: list[bool]  # whether the drafter's argmax is the token
    middle: list[bool]  # whether the middle's is
    inner: list[bool]  # whether the drafter's argmax is the middle's
    # Where the middle's argmax is not the token: whether the drafter's is the middle's at each of
    # the next `BRANCH` positions of the middle's own continuation.
    branches: dict[int, list[bool]]


@dataclass(frozen=True)
class Traces:
    """Texts by prompt set, and seconds of a pass by level and number of tokens."""

    sets: dict[str, list[Text]]
    seconds: dict[str, dict[int, float]]

    def half(self, name: str) -> dict[str, list[Text]]:
        """Return the texts of every set that are for `TUNING`, or those that are `HELD_OUT`."""
        first = int(name == HELD_OUT)
        return {key: texts[first::2] for key, texts in self.sets.items()}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Traces:
        made = json.loads(path.read_text())
        sets = {
            name: [
                Text(**{**one, "branches": {int(p): own for p, own in one["branches"].items()}})
                for one in texts
            ]
            for name, texts in made["sets"].items()
        }
        seconds = {
            name: {int(width): value for width, value in own.items()}
            for name, own in made["seconds"].items()
        }
        return cls(sets, seconds)


def prompt_sets(data: Path, count: int) -> dict[str, list[list[int]]]:
    """Return `count` prompts of each set whose file is in `data`, as token ids.

    Args:
        data: with ``gsm8k_test.jsonl``, ``tinyshakespeare.txt``, ``spec_bench_question.jsonl``.
    """
    texts: dict[str, list[str]] = {}
    gsm8k = data / "gsm8k_test.jsonl"
    if gsm8k.exists():
        lines = gsm8k.read_text(encoding="utf-8").splitlines()[:count]
        texts["gsm8k"] = [tiny.prompt_of(json.loads(line)["question"]) for line in lines]
    plays = data / "tinyshakespeare.txt"
    if plays.exists():
        speeches = plays.read_text(encoding="utf-8").split("\n\n")
        step = max(1, len(speeches) // (count + 1))
        texts["shakespeare"] = ["\n\n".join(speeches[i * step :][:2]) for i in range(1, count + 1)]
    questions = data / "spec_bench_question.jsonl"
    if questions.exists():
        rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
        step = max(1, len(rows) // count)
        texts["spec-bench"] = [row["turns"][0] for row in rows[::step][:count]]
    tokenizer = tiny.tokenizer()
    sets = {name: [ids[:160] for ids in tokenizer(own)["input_ids"]] for name, own in texts.items()}
    chance = random.Random(0)
    sets["random"] = [
        [0, *(chance.randrange(2, len(tokenizer)) for _ in range(60))] for _ in range(count)
    ]
    return sets


@torch.inference_mode()
def record(sets: dict[str, list[list[int]]], length: int) -> Traces:
    """Record texts of at most `length` new tokens, and the times of this processor."""
    with progress.loading(shown=False):
        models = {name: load_model(tiny.path(name), torch.float32) for name in tiny.LEVELS}
    texts = {
        name: [_text(models, prompt, length) for prompt in prompts]
        for name, prompts in sets.items()
    }
    return Traces(texts, measured_seconds())


def measured_seconds() -> dict[str, dict[int, float]]:
    """Measure passes of 1 ... 33 tokens of the shipped levels on this processor."""
    widths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 21, 25, 33]
    made = tiny.levels(pack=True)
    times = pass_seconds(list(made.values()), widths, repeats=12, limit=4.0)
    # A pass could be padded, so one that took longer than a wider one was disturbed.
    least = [
        {width: min(own[other] for other in widths if other >= width) for width in widths}
        for own in times
    ]
    return dict(zip(made, least, strict=True))


def _argmax(model: Any, row: Sequence[int]) -> list[int]:
    ids: list[int] = model(input_ids=torch.tensor([list(row)])).logits[0].argmax(-1).tolist()
    return ids


def _text(models: dict[str, Any], prompt: list[int], length: int) -> Text:
    new = Chain([models["target"]]).generate(prompt, length).sequences[0, len(prompt) :].tolist()
    row, first = [*prompt, *new], len(prompt)
    middle = _argmax(models["middle"], row)[first - 1 : -1]
    drafter = _argmax(models["drafter"], row)[first - 1 : -1]
    wrong = [i for i, token in enumerate(new) if middle[i] != token]
    branches = {}
    if wrong:
        begins = [[*row[: first + i], middle[i]] for i in wrong]
        out = Chain([models["middle"]]).generate(begins, BRANCH, eos_token_id=[])
        for i, begin, going in zip(wrong, begins, out.sequences.tolist(), strict=True):
            going = going[: len(begin) + BRANCH]
            seen = _argmax(models["drafter"], going)[len(begin) - 1 : -1]
            branches[i] = [a == b for a, b in zip(seen, going[len(begin) :], strict=True)]
    return Text(
        prompt,
        new,
        [a == b for a, b in zip(drafter, new, strict=True)],
        [a == b for a, b in zip(middle, new, strict=True)],
        [a == b for a, b in zip(drafter, middle, strict=True)],
        branches,
    )
