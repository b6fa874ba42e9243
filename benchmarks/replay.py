"""Recorded acceptance, and replays of the staged rule in simulated time: the tokens of greedy texts
that each shipped level would propose, and the rounds of a chain with any windows.

Texts at even positions of a set are for tuning: choices by numbers, for example of the policies'
defaults, use them alone. Texts at odd positions are held out, for reports.

At temperature 0 the target's text does not depend on the chain (contract C5), a token is accepted
if it is the argmax of the level above, and the draft tokens of the middle level are its greedy
continuation of the text. So a round is determined, at each position, by whether the middle's argmax
is the target's and whether the drafter's is the middle's. After a token of the middle that the
target rejects, the drafter follows the middle's continuation, which is recorded too.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import questions
from polyspec_ext import progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.levels import load_model
from polyspec_ext.policies import RoundReport, StepReport, WindowPolicy
from polyspec_ext.runtime.plan import default_rounds
from polyspec_ext.scheduler import Scheduler
from polyspec_ext.tuning import pass_seconds

BRANCH = 24  # recorded tokens after a rejected token
TUNING, HELD_OUT = "tuning", "held-out"
_WIDEST = 64  # tokens of a pass, at most


@dataclass(frozen=True)
class Text:
    """A greedy text, by position of its new tokens."""

    prompt: list[int]
    tokens: list[int]  # new tokens
    drafter: list[bool]  # whether the drafter's argmax is the token
    middle: list[bool]  # whether the middle's argmax is the token
    inner: list[bool]  # whether the drafter's argmax is the middle's
    # Where the middle's argmax is not the token: whether the drafter's is the middle's at each of
    # the next `BRANCH` positions of the middle's continuation.
    branches: dict[int, list[bool]]


@dataclass(frozen=True)
class Traces:
    """Texts by prompt set, and seconds of a pass by level and number of tokens."""

    sets: dict[str, list[Text]]
    seconds: dict[str, dict[int, float]]

    def half(self, name: str) -> dict[str, list[Text]]:
        """Return the half `TUNING` or `HELD_OUT` of every set."""
        return {key: texts[name == HELD_OUT :: 2] for key, texts in self.sets.items()}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Traces:
        """Read a file of `save`, with numeric keys as integers."""

        def numbered(items: dict[str, Any]) -> dict[Any, Any]:
            return {int(key) if key.isdigit() else key: value for key, value in items.items()}

        made = json.loads(path.read_text(), object_hook=numbered)
        sets = {name: [Text(**one) for one in texts] for name, texts in made["sets"].items()}
        return cls(sets, made["seconds"])


def prompt_sets(count: int) -> dict[str, list[list[int]]]:
    """Return ids of `count` prompts of each set with a file beside the repository, and of random
    prompts."""
    data = questions.GSM8K.parent
    texts: dict[str, list[str]] = {}
    if questions.GSM8K.exists():
        texts["gsm8k"] = [
            tiny.prompt_of(one.turns[0]) for one in questions.read(questions.GSM8K)[:count]
        ]
    if (plays := data / "tinyshakespeare.txt").exists():
        speeches = plays.read_text(encoding="utf-8").split("\n\n")
        step = max(1, len(speeches) // (count + 1))
        texts["shakespeare"] = ["\n\n".join(speeches[i * step :][:2]) for i in range(1, count + 1)]
    if questions.SPEC_BENCH.exists():
        rows = questions.read(questions.SPEC_BENCH)
        texts["spec-bench"] = [one.turns[0] for one in rows[:: max(1, len(rows) // count)][:count]]
    if not texts:
        raise ValueError(f"expected a folder with the prompt sets, given {data}")
    tokenizer, chance = tiny.tokenizer(), random.Random(0)
    sets = {name: [ids[:160] for ids in tokenizer(own)["input_ids"]] for name, own in texts.items()}
    sets["random"] = [
        [0, *(chance.randrange(2, len(tokenizer)) for _ in range(60))] for _ in range(count)
    ]
    return sets


@torch.inference_mode()
def record(sets: dict[str, list[list[int]]], length: int) -> Traces:
    """Record texts of at most `length` new tokens, and pass times of this processor."""
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
    # A pass could be padded, so a longer time than of a wider pass is a disturbance.
    least = np.minimum.accumulate([[own[n] for n in widths[::-1]] for own in times], axis=1)
    rows = (dict(zip(widths, own[::-1].tolist(), strict=True)) for own in least)
    return dict(zip(made, rows, strict=True))


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
    pairs = ((drafter, new), (middle, new), (drafter, middle))
    below, between, inner = ([a == b for a, b in zip(*pair, strict=True)] for pair in pairs)
    return Text(prompt, new, below, between, inner, branches)


# ---- replays -------------------------------------------------------------------------------------


class Costs:
    """Seconds of the passes of a chain by level and number of tokens read, linearly interpolated
    between measurements."""

    def __init__(self, levels: Sequence[dict[int, float]]) -> None:
        self._levels = [
            np.interp(range(_WIDEST + 1), list(own), list(own.values())).tolist() for own in levels
        ]

    def verify(self, level: int, pending: int) -> float:
        """Return the seconds of a pass of `level` over `pending` tokens and the token before."""
        return float(self._levels[level - 1][pending + 1])

    def draft(self, tokens: int) -> float:
        """Return the seconds of drafting `tokens` tokens, with a pass per token."""
        return tokens * float(self._levels[-1][1])


class Run(NamedTuple):
    """The tokens and seconds of a replay."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Trace:
    """A text in a chain of two levels (the target and a level below) or of all three."""

    def __init__(self, text: Text, levels: Sequence[str]) -> None:
        self.text, self.size, self.levels = text, len(text.tokens), len(levels)
        # [p]: accepted tokens of an endless block from p.
        self.runs = [0] * (self.size + 1)
        accepts = text.middle if "middle" in levels else text.drafter
        for p in reversed(range(self.size)):
            self.runs[p] = self.runs[p + 1] + 1 if accepts[p] else 0

    def round(self, at: int, windows: Sequence[int], costs: Costs) -> tuple[int, list[StepReport]]:
        """Return the number of tokens that a round from `at` commits, and its steps."""
        scheduler = _scheduler(tuple(windows))
        scheduler.start(self.size - at)
        steps: list[StepReport] = []
        while scheduler.committed == 0:
            step = scheduler.next()
            level, count, accepted = step.level, step.count, 0
            drafted = level == self.levels
            if level == 1:
                accepted = min(count, self.runs[at])
            elif not drafted:
                accepted = self._inner(at, scheduler.pending(1), count)
            seconds = costs.draft(count) if drafted else costs.verify(level, count)
            steps.append(StepReport(level, count, accepted, count, 1, seconds))
            scheduler.report(level, count if drafted else accepted + 1)
        return scheduler.committed, steps

    def _inner(self, at: int, offset: int, count: int) -> int:
        """Return the number of tokens that the middle accepts of `count` after `offset` pending."""
        wrong = at + self.runs[at]  # where the middle leaves the text
        for j in range(count):
            p = at + offset + j
            if p <= wrong:
                fits = self.text.inner[p]
            else:
                branch = self.text.branches[wrong]
                fits = branch[(p - wrong - 1) % len(branch)]
            if not fits:
                return j
        return count


@functools.lru_cache(maxsize=4096)
def _scheduler(windows: tuple[int, ...]) -> Scheduler:
    return Scheduler(windows, [*default_rounds(windows), 0])


def replay(
    traces: Sequence[Trace], costs: Costs, policy: WindowPolicy | None, windows: Sequence[int]
) -> Run:
    """Replay all texts one after another. policy None: constant windows."""
    seconds = 0.0
    for trace in traces:
        at, committed, now = 0, 0, list(windows)
        steps: list[StepReport] = []
        while at < trace.size:
            if policy is not None:
                text = [*trace.text.prompt, *trace.text.tokens[:at]]
                now = list(policy.next(RoundReport(0, now, text, committed, steps)))
            committed, steps = trace.round(at, now, costs)
            at += committed
            seconds += sum(step.seconds for step in steps)
    return Run(sum(trace.size for trace in traces), seconds)


def oracle(traces: Sequence[Trace], costs: Costs, choices: Sequence[Sequence[int]]) -> Run:
    """Replay with the fastest windows, chosen round by round with knowledge of the texts."""
    seconds = 0.0
    for trace in traces:
        best = [0.0] * (trace.size + 1)
        for at in reversed(range(trace.size)):
            rounds = (trace.round(at, windows, costs) for windows in choices)
            best[at] = min(
                sum(step.seconds for step in steps) + best[at + committed]
                for committed, steps in rounds
            )
        seconds += best[0]
    return Run(sum(trace.size for trace in traces), seconds)
