"""Measures: every method answers every turn, one after another, in an order that rotates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyspec_ext.bench.differences import first_difference, surprise
from polyspec_ext.bench.generation_calls import Answer, Request
from polyspec_ext.bench.measuring import Step, device_clock, interleaved, timed
from polyspec_ext.bench.paper.conversation import Conversation, Prompt
from polyspec_ext.bench.paper.methods import ENGINE, Call
from polyspec_ext.bench.paper.questions import Question
from polyspec_ext.bench.paper.record import (
    EOS,
    FAILED,
    LENGTH,
    OK,
    Key,
    LevelTurn,
    Turn,
    TurnWriter,
)

TURN_BEFORE = "the turn before failed"
_WARM_UP_TOKENS = 16  # of a turn, at most
_MOST_TURNS = 16  # of a question, so that turns have seeds of their own


@dataclass(frozen=True)
class Asked:
    """What is asked of every method alike."""

    repeats: int
    max_new_tokens: int
    temperature: float
    seed: int
    warm_up: int = 1


@dataclass
class Answers:
    """One method's side of a conversation."""

    said: list[str] = field(default_factory=list)
    failed: bool = False


class Runner:
    """
    Args:
        calls: of the methods, the baseline's among them.
        questions: in the order in which they are asked.
        conversation: makes prompts.
        asked: of every method.
        model: the target as transformers has it, for what can be said about texts.
        eos: ids that end a text.
        writer: has what is done already, and takes what is measured.
        tick: called after every turn of a method.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        questions: Sequence[Question],
        conversation: Conversation,
        asked: Asked,
        model: Any,
        eos: frozenset[int],
        writer: TurnWriter,
        *,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        self._first = next(call for call in calls if call.method.baseline)
        others = [call for call in calls if call is not self._first]
        compared = {call.method.plain for call in others}
        # Those that others' texts are compared with answer before them.
        self._plain = [self._first, *(c for c in others if c.method.name in compared)]
        self._others = [call for call in others if call not in self._plain]
        self._questions, self._conversation = questions, conversation
        self._asked, self._model, self._eos = asked, model, eos
        self._writer, self._tick = writer, tick
        self._clock = device_clock(model.device)
        self._done: Mapping[Key, Turn] = {turn.key: turn for turn in writer.turns}
        # Of the question at hand: everybody's answers, and prompt and text of those that others
        # are compared with, by key.
        self._answers: dict[str, Answers] = {}
        self._references: dict[str, tuple[list[int], list[int]]] = {}

    def run(self) -> None:
        """All that is not done yet."""
        everybody = [*self._plain, *self._others]
        tasks = [len(question.turns) for question in self._questions]
        repeats = self._asked.repeats
        for step, call in interleaved(everybody, tasks, repeats, len(self._plain)):
            if call is self._first:
                self._references = {}
                if step.turn == 0:
                    self._answers = {each.method.name: Answers() for each in everybody}
            self._take_turn(step, call)
            self._tick()

    def warm_up(self) -> None:
        """The first question, before anything is timed. What fails here fails again, and is
        recorded, where it counts."""
        prompt = self._conversation.prompt(self._questions[0].turns[:1], []).ids
        asked = self._asked
        tokens = min(_WARM_UP_TOKENS, asked.max_new_tokens)
        for call in (*self._plain, *self._others):
            try:
                for _ in range(self._asked.warm_up):
                    call.answer(Request([prompt], tokens, asked.temperature, [asked.seed]))
            except Exception:
                continue

    def _take_turn(self, step: Step, call: Call) -> None:
        question, own = self._questions[step.task], self._answers[call.method.name]
        prompt = None
        if not own.failed:
            prompt = self._conversation.prompt(question.turns[: step.turn + 1], own.said)
        done = self._done.get((question.question_id, step.turn, call.method.name, step.repeat))
        if done is None:
            done = self._measure(call, question, step, prompt)
            self._writer.add(done)
        if prompt is None or not done.ok or done.tokens is None:
            own.failed = True
            return
        own.said.append(self._conversation.answer(done.tokens))
        if call in self._plain:
            self._references[call.method.name] = (prompt.ids, done.tokens)

    def _measure(self, call: Call, question: Question, step: Step, prompt: Prompt | None) -> Turn:
        about: dict[str, Any] = {
            "question_id": question.question_id,
            "category": question.category,
            "task": question.task,
            "turn": step.turn,
            "method": call.method.name,
            "repeat": step.repeat,
        }
        if prompt is None:
            return Turn(**about, status=FAILED, error=TURN_BEFORE)
        number = step.repeat * len(self._questions) + step.task
        seed = (self._asked.seed + number * _MOST_TURNS + step.turn) % 2**64
        try:
            answer, seconds = self._decode(call, prompt.ids, seed)
            (tokens,) = answer.texts
            if not tokens:
                raise RuntimeError("expected at least one new token, given none")
            lossless = self._lossless(call, prompt.ids, tokens)
        except Exception as error:  # whatever a method runs into is its own
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Turn(**about, status=FAILED, error=reason)
        stats = answer.stats
        levels = [] if stats is None else zip(call.method.levels, stats.levels, strict=True)
        return Turn(
            **about,
            status=OK,
            prompt_tokens=len(prompt.ids),
            new_tokens=len(tokens),
            seconds=seconds,
            prefill_seconds=answer.prefill_seconds if stats is None else stats.prefill_seconds,
            ended=EOS if tokens[-1] in self._eos else LENGTH,
            levels=[
                LevelTurn(
                    name,
                    level.num_forward_passes,
                    level.seconds,
                    list(level.emitted_per_verification),
                )
                for name, level in levels
            ],
            tokens=tokens,
            lossless=lossless,
            cut=prompt.cut,
        )

    def _decode(self, call: Call, prompt: list[int], seed: int) -> tuple[Answer, float]:
        asked = self._asked
        request = Request([prompt], asked.max_new_tokens, asked.temperature, [seed])
        return timed(call.answer, request, self._clock)

    def _lossless(self, call: Call, prompt: list[int], tokens: list[int]) -> dict[str, Any] | None:
        method = call.method
        if method.kind == ENGINE and self._asked.temperature > 0:
            return None  # its form of the target is another model
        if self._asked.temperature > 0:
            total, variance = surprise(self._model, prompt, tokens, self._asked.temperature)
            return {"surprise": total, "variance": variance}
        if call is self._first or method.plain == method.name:
            return {"identical": True, "at": None, "gap": None}
        reference = self._references.get(method.plain or self._first.method.name)
        if reference is None or reference[0] != prompt:
            return None
        if reference[1] == tokens:
            return {"identical": True, "at": None, "gap": None}
        if method.kind == ENGINE:
            pairs = itertools.zip_longest(reference[1], tokens)
            at = next(n for n, (theirs, own) in enumerate(pairs) if theirs != own)
            return {"identical": False, "at": at, "gap": None}
        found = first_difference(self._model, prompt, reference[1], tokens)
        assert found is not None
        return {"identical": False, "at": found["place"], "gap": found["gap"]}
