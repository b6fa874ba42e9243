"""Chains at work, timed: every step where it happens, what a text costs before its first step, and
the chain's own time.

Between two passes of one level another has used the caches of the processor, so the first step of a
level after those above it have run takes longer than the steps behind it: both are kept apart
(`StepTime.again`), in chains of three levels where there are as many.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ..chain import Chain
from ..policies.base import RoundReport
from .parts import Part, Request, owners_above
from .theory import batches

WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of the lowest level, whose steps are timed
MOST = WINDOWS[-1]
_BLOCKS = 2  # from below, in a round of a chain of three levels
MOST_ABOVE = _BLOCKS * (MOST + 1)  # the largest window of a level above
_ENOUGH = 16  # rounds of every window
_FIXED = 4  # the window of a chain whose own time is measured
LEAST = 4  # rounds of a call that is cut short, so that every level has steps behind its first
_WARMING = 0.25  # of the time, which untimed calls may take
_TIMED = 0.5  # of the time, while there are prompts that have not been asked
_Prompt = TypeVar("_Prompt", bound=Sequence[int])


class StepTime(NamedTuple):
    """One step."""

    part: int  # that ran
    below: int  # the next one of its chain; of the last one itself; of the target alone -1
    # Verified, or asked for; of several rows the most. Of a tree, the depth that it was asked for.
    tokens: int
    seconds: float  # of all rows
    rows: int  # in the caches
    again: bool  # as `theory.PassSeconds` has it: not the first since the target has run
    begins: bool  # it is the part's first of a text
    context: int  # tokens of the text before its round


class Verified(NamedTuple):
    """One verification of one row."""

    tokens: int  # verified; of a tree, its depth
    accepted: int
    asked: int  # of a drafter without a model, which may have fewer to propose; else `tokens`
    # Fewer were asked for than the window has, since the text was nearly complete. Had all of them
    # been accepted the text would be, and nobody told of the round: what such rounds accepted is
    # not what they accept on average.
    cut: bool = False


class Round(NamedTuple):
    """One round of the target that no policy looked at."""

    own: float  # seconds that are of no level
    begins: bool  # it is the first of a call


class Text(NamedTuple):
    """What a call costs beside its rounds, in seconds."""

    prompt: int  # tokens of the longest
    prefill: dict[int, float]  # by part
    outside: float  # neither prefill nor rounds


def slots_after(slots: int, active: int) -> int:
    """Rows in the caches, of which so many are not complete (`Engine.leave`)."""
    return active if 4 * active <= 3 * slots else slots


class _Turns:
    """A policy that goes through windows in turns, whatever comes of them, and keeps what it is
    told: in `steps`, and in `verified`."""

    def __init__(
        self, parts: Sequence[Part], chain: Sequence[int], request: Request, steps: list[StepTime]
    ) -> None:
        self.chain, self.request, self.steps = chain, request, steps
        self.last = parts[chain[-1]]
        self.turn = 0
        self.verified: dict[tuple[int, int], list[Verified]] = {
            pair: [] for pair in itertools.pairwise(chain)
        }
        self.begin()

    def begin(self) -> None:
        """Another call."""
        self._begun: set[int] = set()
        self._prompts: dict[int, int] = {}
        self._slots, self._told, self._before, self._last = self.request.batch, 0, 0, -1

    def next(self, report: RoundReport) -> Sequence[int]:
        if report.request <= self._last or self._last < 0:
            self.turn += 1
            self._before, self._told = self._told, 0
            if self._before:
                self._slots = slots_after(self._slots, self._before)
        self._told, self._last = self._told + 1, report.request
        self._prompts.setdefault(report.request, len(report.text))
        if report.steps:
            self._keep(report)
        order = [*WINDOWS[::2], *WINDOWS[1::2]]
        window = order[(self.turn - 1) % len(order)]
        return [*[_BLOCKS * (window + 1)] * (len(self.chain) - 2), window]

    def _keep(self, report: RoundReport) -> None:
        first = report.request not in self._begun
        self._begun.add(report.request)
        context = len(report.text) - report.committed
        new = context - self._prompts[report.request]
        # Tokens that a draft may have so that all levels above the drafter have room for their own.
        room = self.request.max_new_tokens - new - (len(self.chain) - 1)
        window = report.windows[-1]
        seen: dict[int, int] = {}
        for step in report.steps:
            number = seen[step.level] = seen.get(step.level, 0) + 1
            drafted = step.level == len(self.chain)
            part = self.chain[step.level - 1]
            below = self.chain[min(step.level, len(self.chain) - 1)]
            tokens, asked = step.width, max(0, min(window, room))
            # What a drafter without a model was asked for is more than it had to propose.
            lowest = not self.last.model and below == self.chain[-1]
            if lowest and (drafted or (self.last.trees and step.tokens)):
                tokens = asked if self.request.batch == 1 else window
            if not drafted:
                self.verified[part, below].append(
                    Verified(step.tokens, step.accepted, asked, asked < window)
                    if lowest
                    else Verified(step.tokens, step.accepted, step.tokens)
                )
            if step.level == len(self.chain) - 1 > 1:
                room -= step.accepted + 1
            if step.repeated or not step.seconds:
                continue
            begins = first and number == 1
            self.steps.append(
                StepTime(
                    part, below, tokens, step.seconds, self._slots, number > 1, begins, context
                )
            )


@dataclass
class Run:
    """Calls of one chain: of the target alone, of a chain with one window (`fixed`), whose time
    outside the levels counts, or of one whose windows take turns (`turns`), whose steps do."""

    parts: Sequence[Part]
    chain: tuple[int, ...]
    request: Request
    fixed: bool = False
    steps: list[StepTime] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    spent: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        things = [self.parts[n].thing for n in self.chain]
        self.turns: _Turns | None = None
        if len(self.chain) == 1:
            self._ready = Chain(things)
        elif self.fixed:
            self._ready = Chain(things, [_FIXED] * (len(things) - 1))
        else:
            self.turns = _Turns(self.parts, self.chain, self.request, self.steps)
            windows = [MOST_ABOVE] * (len(things) - 2)
            self._ready = Chain(things, [*windows, MOST], policy=self.turns)

    @property
    def enough(self) -> bool:
        """Whether a prompt need not be asked a second time."""
        if self.turns is None:
            return len(self.chain) > 1 and len(self.rounds) >= 4 * _ENOUGH
        return self.turns.turn >= _ENOUGH * len(WINDOWS)

    @property
    def tells(self) -> bool:
        """Whether what its levels accept is known by its rounds only, and not along a text."""
        below = [self.parts[n] for n in self.chain[1:]]
        unread = any(part.reads_states or (part.model and not part.reads_apart) for part in below)
        return self.turns is not None and unread

    def warm_up(self, prompts: Sequence[Sequence[int]], limit: float = math.inf) -> None:
        """Passes of every size, untimed: some are made when they first run. No round begins behind
        `limit` seconds."""
        tokens = 4 if self.turns is None else min(sum(WINDOWS), self.request.max_new_tokens)
        options = {**self.request.options(), "max_new_tokens": tokens}
        began = time.perf_counter()
        batch = self._ready.batch(list(prompts), **options)
        while batch.advance() and time.perf_counter() - began <= limit:
            pass
        if self.turns is not None:
            self.steps.clear()
            for own in self.turns.verified.values():
                own.clear()
            self.turns.turn = 0

    def call(
        self, prompts: Sequence[Sequence[int]], number: int, limit: float = math.inf
    ) -> list[list[int]]:
        """Continue prompts, timed; the new tokens of each. Behind `limit` seconds no round begins
        but the first `LEAST`."""
        if self.turns is not None:
            self.turns.begin()
        began = time.perf_counter()
        batch = self._ready.batch(list(prompts), **self.request.options(number))
        stats, last = batch.stats, [0.0] * (len(self.chain) + 1)
        slots, begins, done = len(prompts), True, 0
        while done < LEAST or time.perf_counter() - began <= limit:
            done += 1
            active = [len(row.tokens) for row in batch.rows if not row.ended]
            slots = slots_after(slots, len(active))
            if not batch.advance():
                break
            now = [*(level.seconds for level in stats.levels), stats.decode_seconds]
            *levels, whole = (b - a for a, b in zip(last, now, strict=True))
            if self.turns is None:
                self.rounds.append(Round(whole - sum(levels), begins))
            if len(self.chain) == 1:
                context = round(sum(active) / max(len(active), 1))
                self.steps.append(StepTime(0, -1, 0, levels[0], slots, False, begins, context))
            last, begins = now, False
        spent = time.perf_counter() - began
        self.spent += spent
        self.tokens += stats.num_new_tokens
        prefill = [level.prefill_seconds for level in stats.levels]
        outside = max(0.0, spent - sum(prefill) - stats.decode_seconds)
        by_part = dict(zip(self.chain, prefill, strict=True))
        self.texts.append(Text(max(map(len, prompts)), by_part, outside))
        rows = zip(batch.rows, prompts, strict=True)
        return [list(row.tokens[len(prompt) :]) for row, prompt in rows]


def timed_runs(parts: Sequence[Part], request: Request) -> list[Run]:
    """The target alone, a chain with one window, and the chains whose steps are timed: the target
    with the next model, with every model and the one below that, and with every drafter; with the
    last model and a drafter, since that model verifies as well; and with a copy of the target and
    every drafter that reads its states, of which no other chain tells how a tree is verified, or
    what is accepted."""
    models = [n for n, part in enumerate(parts) if part.verifies]
    drafters = [n for n, part in enumerate(parts) if not part.verifies]
    found: list[tuple[int, ...]] = [(0, n) for n in models[1:2]]
    found += [(0, *pair) for pair in itertools.pairwise(models[1:])]
    found += [(0, n) for n in drafters]
    if len(models) > 1:
        below = [n for n in drafters if parts[n].drafts_below(parts[models[-1]], parts[0])]
        found += [(0, models[-1], n) for n in below[:1]]
    found += [
        (0, model, n)
        for model in models[1:]
        for n in drafters
        if parts[n].reads_states and parts[n].drafts_below(parts[model], parts[0])
    ]
    chains = [one for one in dict.fromkeys(found) if owners_above([parts[n] for n in one])]
    fixed = [Run(parts, one, request, fixed=True) for one in chains[:1]]
    return [Run(parts, (0,), request), *fixed, *(Run(parts, one, request) for one in chains)]


def representative(prompts: Sequence[_Prompt], batch: int) -> list[_Prompt]:
    """The prompts, calls of `batch` of them in an order in which any number of the first stand for
    all by their lengths: that of the middle length, the longest, the shortest, then ever finer
    between these. A call that is short of prompts stays the last."""
    whole = len(prompts) // batch * batch
    calls = [prompts[n : n + batch] for n in range(0, whole, batch)]
    calls.sort(key=lambda own: max(map(len, own)))
    last = len(calls) - 1
    order = dict.fromkeys([len(calls) // 2, last, 0] if calls else [])
    between = [(0, len(calls) // 2), (len(calls) // 2, last)]
    for low, high in between:
        if high - low > 1:
            middle = (low + high) // 2
            order[middle] = None
            between += [(low, middle), (middle, high)]
    return [one for n in order for one in calls[n]] + list(prompts[whole:])


def in_turns(
    runs: Sequence[Run], prompts: Sequence[Sequence[int]], batch: int, limit: float
) -> list[tuple[list[int], list[int]]]:
    """All runs continue one batch of prompts after the other, so that a change in the machine's
    load meets all; as many as there is time for, again and again while rounds are missing. Prompts
    that there was no time for are continued by the fastest run alone, of those whose rounds tell
    what no text does: the target's texts are the same, or have the same distribution, below
    whatever chain. Of slow models a call is cut short where only its steps are wanted, and not its
    text, so that every run has its share of the time.

    Returns:
        The prompts that were asked and the target's continuations.
    """
    groups = [[prompts[n] for n in own] for own in batches(len(prompts), batch).tolist()]
    each = _TIMED * limit / len(runs)
    for run in runs:
        run.warm_up(groups[0], _WARMING * each)
    texts: list[tuple[list[int], list[int]]] = []

    def keep(number: int, new: Sequence[list[int]]) -> None:
        fresh = len(prompts) - number * batch  # the last group has the first prompts again
        pairs = zip(groups[number][:fresh], new, strict=False)
        texts.extend((list(prompt), own) for prompt, own in pairs if own)

    began, asked = time.perf_counter(), 0
    for number in range(3 * len(groups)):
        again = number >= len(groups)
        over = time.perf_counter() - began > (limit if again else _TIMED * limit)
        if (texts and over) or (again and all(run.enough for run in runs[1:])):
            break
        group = groups[number % len(groups)]
        new = runs[0].call(group, number)
        if not again:
            keep(number, new)
            asked += 1
        for run in runs[1:]:
            if not (again and run.enough):
                run.call(group, number, each)
    telling = [run for run in runs if run.tells] or runs
    fastest = min(telling, key=lambda run: run.spent / max(run.tokens, 1))
    for number in range(asked, len(groups)):
        if time.perf_counter() - began > limit:
            break
        keep(number, fastest.call(groups[number], number))
    if not any(not one.begins for one in runs[0].rounds):
        raise ValueError(
            "prompts: expected one that the target continues with two tokens or more, given none"
        )
    return texts
