"""The staged rule along recorded texts (`traces`), in simulated time: what a chain with given
windows would have done, step by step, without a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import Text
from polyspec_ext.policies import RoundReport, StepReport, WindowPolicy
from polyspec_ext.runtime.plan import default_rounds
from polyspec_ext.scheduler import Scheduler

_WIDEST = 64  # tokens of a pass, at most


class Costs:
    """Seconds of the passes of a chain, by level and number of tokens read: between those measured,
    on a straight line."""

    def __init__(self, levels: Sequence[dict[int, float]]) -> None:
        self._levels = [
            np.interp(range(_WIDEST + 1), list(own), list(own.values())).tolist() for own in levels
        ]

    def verify(self, level: int, pending: int) -> float:
        """Return the seconds of a pass of `level` over `pending` tokens and the one before them."""
        return float(self._levels[level - 1][pending + 1])

    def draft(self, tokens: int) -> float:
        """Return the seconds of a pass per token."""
        return tokens * float(self._levels[-1][1])


@dataclass
class Run:
    """The seconds and tokens of a replay."""

    seconds: float = 0.0
    tokens: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Trace:
    """One text as a chain of two levels (target and one below) or of all three sees it."""

    def __init__(self, text: Text, levels: Sequence[str]) -> None:
        self.text, self.size, self.levels = text, len(text.tokens), len(levels)
        # [p]: accepted tokens of an endless block that begins at p.
        self.runs = [0] * (self.size + 1)
        accepts = text.middle if "middle" in levels else text.drafter
        for p in reversed(range(self.size)):
            self.runs[p] = self.runs[p + 1] + 1 if accepts[p] else 0

    def round(self, at: int, windows: Sequence[int], costs: Costs) -> tuple[int, list[StepReport]]:
        """Return the tokens that a round from position `at` commits, and its steps."""
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
        """Return how many of `count` tokens after `offset` pending ones the middle accepts."""
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
    """Replay all texts one after another. policy None: the windows stay."""
    run = Run()
    for trace in traces:
        at, now = 0, list(windows)
        steps: list[StepReport] = []
        committed = 0
        prompt = trace.text.prompt
        while at < trace.size:
            if policy is not None:
                text = [*prompt, *trace.text.tokens[:at]]
                now = list(policy.next(RoundReport(0, now, text, committed, steps)))
            committed, steps = trace.round(at, now, costs)
            at += committed
            run.seconds += sum(step.seconds for step in steps)
        run.tokens += trace.size
    return run


def oracle(traces: Sequence[Trace], costs: Costs, choices: Sequence[Sequence[int]]) -> Run:
    """Replay with the windows of the least time, chosen round by round with the texts at hand."""
    run = Run()
    for trace in traces:
        best = [0.0] * (trace.size + 1)
        for at in reversed(range(trace.size)):
            options = []
            for windows in choices:
                committed, steps = trace.round(at, windows, costs)
                spent = sum(step.seconds for step in steps)
                options.append(spent + best[at + committed])
            best[at] = min(options)
        run.seconds += best[0]
        run.tokens += trace.size
    return run
