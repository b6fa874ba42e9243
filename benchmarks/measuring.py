"""The loop in which generations are measured: everybody answers every prompt in turns, in an order
that rotates, so that a change in the machine's load meets all of them.

``benchmarks chains``, ``benchmarks paper`` and the demo share it. Everybody's tokens are
counted alike, up to and including the EOS, over wall time from the prompt to the last token,
prefill included; chains tell their prefill apart.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from benchmarks.generation_calls import Answer, Decode, Request, chain_call
from benchmarks.timing import rotated
from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.planning.search import Candidate
from polyspec_ext.stats import Stats, merge

Clock = Callable[[], float]
T = TypeVar("T")


class Step(NamedTuple):
    """Whose turn it is, and what with: by number, a repeat, a task and a turn of it."""

    repeat: int
    task: int
    turn: int


def interleaved(
    everybody: Sequence[T], tasks: Sequence[int], repeats: int, first: int = 1
) -> Iterator[tuple[Step, T]]:
    """Everybody at every turn. The first come first, since the others are compared with them; the
    others rotate.

    Args:
        tasks: turns of each.
        first: how many come first.
    """
    ahead, others = everybody[:first], everybody[first:]
    for repeat in range(repeats):
        for task, turns in enumerate(tasks):
            for turn in range(turns):
                for one in (*ahead, *rotated(others, task + turn + repeat)):
                    yield Step(repeat, task, turn), one


def device_clock(device: torch.device) -> Clock:
    """Seconds of wall time, told when the device has done all that was started on it."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def timed(decode: Decode, request: Request, clock: Clock) -> tuple[Answer, float]:
    """What is answered, and the seconds that it took, by its own clock where it has one."""
    began = clock()
    answer = decode(request)
    spent = clock() - began
    return answer, spent if answer.seconds is None else answer.seconds


class Spent:
    """Seconds by what they were spent on.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Those of the block, also where it fails; a block within another counts in both."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + self._clock() - began


@dataclass
class Contender:
    """One way to generate, and what it measured."""

    label: str  # for tables
    decode: Decode
    # Of a chain; the candidate is the planner's, with its prediction. None: nobody asked.
    window: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    tail: int = 0
    rule: str = "token"
    candidate: Candidate | None = None
    # By (repeat, prompt).
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)  # by prompt, of the last repeat
    stats: list[Stats] = field(default_factory=list)  # of every call; none of other engines
    plain: str | None = None  # label of whose texts these are compared with; None: the first

    @classmethod
    def of_chain(cls, label: str, chain: Chain, candidate: Candidate | None = None) -> Contender:
        """A chain of ours."""
        return cls(
            label,
            chain_call(chain),
            window=list(chain.window),
            rounds=list(chain.rounds),
            tail=chain.tail,
            rule=chain.rule,
            candidate=candidate,
        )

    def rates(self) -> list[float]:
        """Tokens per second of every repeat."""
        return [
            sum(n for (r, _), n in self.tokens.items() if r == repeat)
            / sum(s for (r, _), s in self.seconds.items() if r == repeat)
            for repeat in sorted({repeat for repeat, _ in self.seconds})
        ]

    def rate(self) -> float:
        """Tokens per second: median over the repeats."""
        return statistics.median(self.rates())

    def decoding_rate(self) -> float | None:
        """Tokens per second of wall time without the prefill, over all repeats; None for
        transformers."""
        return merge(self.stats).tokens_per_second if self.stats else None


def ratios(a: Contender, b: Contender) -> dict[str, float]:
    """Rate of `a` over that of `b`, repeat by repeat: median, lowest and highest."""
    each = [x / y for x, y in zip(a.rates(), b.rates(), strict=True)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each)}


def measure(
    made: Sequence[Contender],
    prompts: Sequence[list[int]],
    *,
    repeats: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    warm_up: int = 8,
    uncounted: int = 0,
    clock: Clock = time.perf_counter,
    desc: str = "measuring",
    tick: Callable[[], object] = lambda: None,
) -> None:
    """Everybody has its turn at every prompt, beside a progress bar.

    Args:
        seed: of the first prompt's first repeat. A prompt has one seed however it is run.
        warm_up: new tokens of a first call of each, which does not count.
        uncounted: whole repeats before those that count. CUDA graphs are captured in the second.
        tick: called behind every answer.
    """

    def request(number: int, repeat: int, tokens: int) -> Request:
        own = seed + repeat * len(prompts) + number
        return Request([prompts[number]], tokens, temperature, [own])

    for one in made:
        one.decode(request(0, 0, warm_up))
    for _, number in itertools.product(range(uncounted), range(len(prompts))):
        for one in made:
            one.decode(request(number, 0, max_new_tokens))
    steps = list(interleaved(made, [1] * len(prompts), repeats))
    for step, one in progress.bar(steps, desc=desc, leave=False):
        number = step.task
        answer, seconds = timed(one.decode, request(number, step.repeat, max_new_tokens), clock)
        (text,) = answer.texts
        one.seconds[step.repeat, number] = seconds
        one.tokens[step.repeat, number] = len(text)
        one.texts[number] = text
        if answer.stats is not None:
            one.stats.append(answer.stats)
        tick()
