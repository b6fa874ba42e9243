"""Measures: every method answers every turn, one after another, in an order that rotates."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.differences import first_difference, surprise
from benchmarks.generation_calls import Request
from benchmarks.measuring import Step, device_clock, interleaved, timed
from polyspec_ext.levels import HuggingFaceLevel

from .conversation import Conversation, Prompt
from .methods import ENGINE, Call
from .questions import Question, batches
from .record import EOS, FAILED, LENGTH, OK, Key, LevelTurn, Turn, TurnWriter

TURN_BEFORE = "the turn before failed"
_WARM_UP_TOKENS = 16  # of a turn, at most
_MOST_TURNS = 16  # of a question, so that turns have seeds of their own


class Runner:
    """
    Args:
        calls: of the methods, the baseline's among them.
        questions: in the order in which they are asked, `batches` of them at once.
        conversation: makes prompts.
        asked: of every method alike: ``repeats``, ``max_new_tokens``, ``temperature``, ``seed``,
            ``warm_up`` and ``batch``, the questions of a call.
        target: whose model says something about texts.
        writer: has what is done already, and takes what is measured.
        tick: called with the turns of each call.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        questions: Sequence[Question],
        conversation: Conversation,
        asked: argparse.Namespace,
        target: HuggingFaceLevel,
        writer: TurnWriter,
        tick: Callable[[int], object],
    ) -> None:
        self._first = next(call for call in calls if call.method.baseline)
        others = [call for call in calls if call is not self._first]
        compared = {call.method.plain for call in others}
        # Those that others' texts are compared with answer before them.
        self._plain = [self._first, *(c for c in others if c.method.name in compared)]
        self._calls = [*self._plain, *(call for call in others if call not in self._plain)]
        self._questions, self._conversation = questions, conversation
        self._batches = batches(questions, asked.batch)
        self._asked, self._writer, self._tick = asked, writer, tick
        self._model, self._eos = target.model, frozenset(target.eos_token_ids)
        self._clock = device_clock(target.model.device)
        self._done: dict[Key, Turn] = {turn.key: turn for turn in writer.turns}
        # Of the batch at hand, by key: every method's answers so far (None: a turn failed), and
        # prompts and texts of those that others are compared with.
        self._said: dict[str, list[list[str]] | None] = {}
        self._references: dict[str, list[tuple[list[int], list[int]]]] = {}

    def run(self) -> None:
        """All that is not done yet."""
        tasks = [len(self._questions[batch[0]].turns) for batch in self._batches]
        repeats = self._asked.repeats
        for step, call in interleaved(self._calls, tasks, repeats, len(self._plain)):
            rows = len(self._batches[step.task])
            if call is self._first:
                self._references = {}
                if step.turn == 0:
                    self._said = {one.method.name: [[] for _ in range(rows)] for one in self._calls}
            self._take_turn(step, call)
            self._tick(rows)

    def warm_up(self) -> None:
        """The first batch, before anything is timed. What fails here fails again, and is
        recorded, where it counts."""
        asked = self._asked
        first = [self._questions[place].turns[:1] for place in self._batches[0]]
        prompts = [self._conversation.prompt(turns, []).ids for turns in first]
        tokens = min(_WARM_UP_TOKENS, asked.max_new_tokens)
        request = Request(prompts, tokens, asked.temperature, [asked.seed] * len(prompts))
        for call in self._calls:
            with contextlib.suppress(Exception):
                for _ in range(asked.warm_up):
                    call.answer(request)

    def _take_turn(self, step: Step, call: Call) -> None:
        batch = [self._questions[place] for place in self._batches[step.task]]
        name = call.method.name
        before = self._said[name]
        prompts = None
        if before is not None:
            prompts = [
                self._conversation.prompt(question.turns[: step.turn + 1], said)
                for question, said in zip(batch, before, strict=True)
            ]
        keys = [(question.question_id, step.turn, name, step.repeat) for question in batch]
        if any(key not in self._done for key in keys):
            # The batch is measured whole; what is on the disk stays as it is.
            for turn in self._measured(call, batch, step, prompts):
                if turn.key not in self._done:
                    self._done[turn.key] = turn
                    self._writer.add(turn)
        done = [self._done[key] for key in keys]
        texts = [turn.tokens for turn in done if turn.tokens is not None]
        if before is None or prompts is None or len(texts) < len(batch):
            self._said[name] = None
            return
        for said, text in zip(before, texts, strict=True):
            said.append(self._conversation.answer(text))
        if call in self._plain:
            ids = [prompt.ids for prompt in prompts]
            self._references[name] = list(zip(ids, texts, strict=True))

    def _measured(
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
        error = TURN_BEFORE
        if prompts is not None:
            try:
                numbers = self._numbers(call, step, prompts)
                return [
                    Turn(**about, status=OK, **own)
                    for about, own in zip(abouts, numbers, strict=True)
                ]
            except Exception as reason:  # whatever a method runs into is its own
                error = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        return [Turn(**about, status=FAILED, error=error) for about in abouts]

    def _numbers(self, call: Call, step: Step, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """What is measured of the turns of a call."""
        asked, rows = self._asked, len(prompts)
        # A question's turn has one seed, however many it is answered with.
        places = (step.repeat * len(self._questions) + at for at in self._batches[step.task])
        seeds = [(asked.seed + place * _MOST_TURNS + step.turn) % 2**64 for place in places]
        ids = [prompt.ids for prompt in prompts]
        request = Request(ids, asked.max_new_tokens, asked.temperature, seeds)
        answer, seconds = timed(call.answer, request, self._clock)
        if not all(answer.texts):
            raise RuntimeError("expected at least one new token, given none")
        stats = answer.stats
        prefill = answer.prefill_seconds if stats is None else stats.prefill_seconds
        found = []
        for row, (prompt, tokens) in enumerate(zip(prompts, answer.texts, strict=True)):
            own = [] if stats is None else answer.rows[row].levels
            levels = [
                LevelTurn(
                    name,
                    level.num_forward_passes,
                    level.seconds / rows,
                    list(level.emitted_per_verification),
                )
                for name, level in zip(call.method.levels if own else (), own, strict=True)
            ]
            found.append(
                {
                    "prompt_tokens": len(prompt.ids),
                    "new_tokens": len(tokens),
                    "seconds": seconds / rows,
                    "prefill_seconds": None if prefill is None else prefill / rows,
                    "ended": EOS if tokens[-1] in self._eos else LENGTH,
                    "levels": levels,
                    "tokens": tokens,
                    "lossless": self._lossless(call, row, prompt.ids, tokens),
                    "cut": prompt.cut,
                    "batch": rows,
                }
            )
        return found

    def _lossless(
        self, call: Call, row: int, prompt: list[int], tokens: list[int]
    ) -> dict[str, Any] | None:
        method, temperature = call.method, self._asked.temperature
        if temperature > 0:
            if method.kind == ENGINE:
                return None  # its form of the target is another model
            total, variance = surprise(self._model, prompt, tokens, temperature)
            return {"surprise": total, "variance": variance}
        same = {"identical": True, "at": None, "gap": None}
        if call is self._first or method.plain == method.name:
            return same
        references = self._references.get(method.plain or self._first.method.name)
        if references is None or references[row][0] != prompt:
            return None
        reference = references[row][1]
        if reference == tokens:
            return same
        if method.kind == ENGINE:
            pairs = itertools.zip_longest(reference, tokens)
            at = next(n for n, (theirs, own) in enumerate(pairs) if theirs != own)
            return {"identical": False, "at": at, "gap": None}
        found = first_difference(self._model, prompt, reference, tokens)
        assert found is not None
        return {"identical": False, "at": found["place"], "gap": found["gap"]}
