"""Measures: every method answers every turn, one after another, in an order that rotates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyspec_ext.bench.differences import first_difference, surprise
from polyspec_ext.bench.generation_calls import Request
from polyspec_ext.bench.measuring import Step, device_clock, interleaved, timed
from polyspec_ext.bench.paper.conversation import Conversation, Prompt
from polyspec_ext.bench.paper.methods import ENGINE, Call
from polyspec_ext.bench.paper.questions import Question, batches
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
    batch: int = 1  # questions of a call


@dataclass
class Answers:
    """One method's side of the conversations of a batch."""

    said: list[list[str]]
    failed: bool = False


class Runner:
    """
    Args:
        calls: of the methods, the baseline's among them.
        questions: in the order in which they are asked, `batches` of them at once.
        conversation: makes prompts.
        asked: of every method.
        model: the target as transformers has it, for what can be said about texts.
        eos: ids that end a text.
        writer: has what is done already, and takes what is measured.
        tick: called with the turns of each call.
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
        tick: Callable[[int], object] = lambda n: None,
    ) -> None:
        self._first = next(call for call in calls if call.method.baseline)
        others = [call for call in calls if call is not self._first]
        compared = {call.method.plain for call in others}
        # Those that others' texts are compared with answer before them.
        self._plain = [self._first, *(c for c in others if c.method.name in compared)]
        self._others = [call for call in others if call not in self._plain]
        self._questions, self._conversation = questions, conversation
        self._batches = batches(questions, asked.batch)
        self._asked, self._model, self._eos = asked, model, eos
        self._writer, self._tick = writer, tick
        self._clock = device_clock(model.device)
        self._done: Mapping[Key, Turn] = {turn.key: turn for turn in writer.turns}
        # Of the batch at hand: everybody's answers, and prompts and texts of those that others are
        # compared with, by key.
        self._answers: dict[str, Answers] = {}
        self._references: dict[str, list[tuple[list[int], list[int]]]] = {}

    def run(self) -> None:
        """All that is not done yet."""
        everybody = [*self._plain, *self._others]
        tasks = [len(self._questions[batch[0]].turns) for batch in self._batches]
        repeats = self._asked.repeats
        for step, call in interleaved(everybody, tasks, repeats, len(self._plain)):
            if call is self._first:
                self._references = {}
                if step.turn == 0:
                    rows = len(self._batches[step.task])
                    self._answers = {
                        each.method.name: Answers([[] for _ in range(rows)]) for each in everybody
                    }
            self._take_turn(step, call)
            self._tick(len(self._batches[step.task]))

    def warm_up(self) -> None:
        """The first batch, before anything is timed. What fails here fails again, and is
        recorded, where it counts."""
        first = [self._questions[place].turns[:1] for place in self._batches[0]]
        prompts = [self._conversation.prompt(turns, []).ids for turns in first]
        asked = self._asked
        seeds = [asked.seed] * len(prompts)
        tokens = min(_WARM_UP_TOKENS, asked.max_new_tokens)
        for call in (*self._plain, *self._others):
            try:
                for _ in range(self._asked.warm_up):
                    call.answer(Request(prompts, tokens, asked.temperature, seeds))
            except Exception:
                continue

    def _take_turn(self, step: Step, call: Call) -> None:
        batch = [self._questions[place] for place in self._batches[step.task]]
        own, name = self._answers[call.method.name], call.method.name
        prompts = None
        if not own.failed:
            prompts = [
                self._conversation.prompt(question.turns[: step.turn + 1], said)
                for question, said in zip(batch, own.said, strict=True)
            ]
        keys = [(question.question_id, step.turn, name, step.repeat) for question in batch]
        found = [self._done.get(key) for key in keys]
        if None in found:  # a batch is measured whole; what is on the disk stays as it is
            measured = self._measure(call, batch, step, prompts)
            for place, turn in enumerate(measured):
                if found[place] is None:
                    found[place] = turn
                    self._writer.add(turn)
        done = [turn for turn in found if turn is not None]
        texts = [turn.tokens for turn in done if turn.ok and turn.tokens is not None]
        if prompts is None or len(texts) < len(batch):
            own.failed = True
            return
        for said, text in zip(own.said, texts, strict=True):
            said.append(self._conversation.answer(text))
        if call in self._plain:
            ids = [prompt.ids for prompt in prompts]
            self._references[name] = list(zip(ids, texts, strict=True))

    def _measure(
        self, call: Call, batch: Sequence[Question], step: Step, prompts: list[Prompt] | None
    ) -> list[Turn]:
        abouts: list[dict[str, Any]] = [
            {
                "question_id": question.question_id,
                "category": question.category,
                "task": question.task,
                "turn": step.turn,
                "method": call.method.name,
                "repeat": step.repeat,
            }
            for question in batch
        ]
        if prompts is None:
            return [Turn(**about, status=FAILED, error=TURN_BEFORE) for about in abouts]
        try:
            return self._measured(call, abouts, step, prompts)
        except Exception as error:  # whatever a method runs into is its own
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return [Turn(**about, status=FAILED, error=reason) for about in abouts]

    def _measured(
        self, call: Call, abouts: list[dict[str, Any]], step: Step, prompts: list[Prompt]
    ) -> list[Turn]:
        asked, rows = self._asked, len(prompts)
        request = Request(
            [prompt.ids for prompt in prompts],
            asked.max_new_tokens,
            asked.temperature,
            [self._seed(place, step) for place in self._batches[step.task]],
        )
        answer, seconds = timed(call.answer, request, self._clock)
        if not all(answer.texts):
            raise RuntimeError("expected at least one new token, given none")
        stats = answer.stats
        prefill = answer.prefill_seconds if stats is None else stats.prefill_seconds
        turns = []
        for row, (about, prompt, tokens) in enumerate(
            zip(abouts, prompts, answer.texts, strict=True)
        ):
            own = [] if stats is None else answer.rows[row].levels
            levels = zip(call.method.levels if own else (), own, strict=True)
            turn = Turn(
                **about,
                status=OK,
                prompt_tokens=len(prompt.ids),
                new_tokens=len(tokens),
                seconds=seconds / rows,
                prefill_seconds=None if prefill is None else prefill / rows,
                ended=EOS if tokens[-1] in self._eos else LENGTH,
                levels=[
                    LevelTurn(
                        name,
                        level.num_forward_passes,
                        level.seconds / rows,
                        list(level.emitted_per_verification),
                    )
                    for name, level in levels
                ],
                tokens=tokens,
                lossless=self._lossless(call, row, prompt.ids, tokens),
                cut=prompt.cut,
                batch=rows,
            )
            turns.append(turn)
        return turns

    def _seed(self, place: int, step: Step) -> int:
        """Of a question's turn, however many it is answered with."""
        number = step.repeat * len(self._questions) + place
        return (self._asked.seed + number * _MOST_TURNS + step.turn) % 2**64

    def _lossless(
        self, call: Call, row: int, prompt: list[int], tokens: list[int]
    ) -> dict[str, Any] | None:
        method = call.method
        if method.kind == ENGINE and self._asked.temperature > 0:
            return None  # its form of the target is another model
        if self._asked.temperature > 0:
            total, variance = surprise(self._model, prompt, tokens, self._asked.temperature)
            return {"surprise": total, "variance": variance}
        if call is self._first or method.plain == method.name:
            return {"identical": True, "at": None, "gap": None}
        references = self._references.get(method.plain or self._first.method.name)
        if references is None or references[row][0] != prompt:
            return None
        reference = references[row][1]
        if reference == tokens:
            return {"identical": True, "at": None, "gap": None}
        if method.kind == ENGINE:
            pairs = itertools.zip_longest(reference, tokens)
            at = next(n for n, (theirs, own) in enumerate(pairs) if theirs != own)
            return {"identical": False, "at": at, "gap": None}
        found = first_difference(self._model, prompt, reference, tokens)
        assert found is not None
        return {"identical": False, "at": found["place"], "gap": found["gap"]}
