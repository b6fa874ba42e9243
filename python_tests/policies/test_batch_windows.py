"""Policies for a batch, by simulated costs that grow with the tokens of a pass of all rows: windows
shrink as there are more rows, and no batch is slower than its plain decoding."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import toy_rows

import polyspec_ext as ps
from polyspec_ext import policies
from polyspec_ext.policies import RoundReport, StepReport

BY_TIMES = ["online", "joint"]
FREE = 8  # tokens of a pass that memory bounds; from there on arithmetic does
DRAFT = 0.1  # of such a pass, a pass of the drafter


def verify(batch: int, window: int) -> float:
    return max(1.0, batch * (window + 1) / FREE)


def draft(batch: int, window: int) -> float:
    return DRAFT * window * max(1.0, batch / FREE)


def best(accept: Sequence[float]) -> tuple[int, float]:
    """The window of the least time per token and row, and that time."""
    batch = len(accept)

    def each(window: int) -> float:
        tokens = sum(sum(a**i for i in range(window + 1)) for a in accept) / batch
        return (verify(batch, window) + draft(batch, window)) / tokens

    window = min(range(17), key=each)
    return window, each(window)


@dataclass
class Rows:
    """A batch of texts, decoded one after another with one policy."""

    policy: policies.WindowPolicy
    accept: Sequence[float]
    windows: list[list[int]] = field(default_factory=list)  # of each round, by row
    spent: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(3)

    def texts(self, rounds: int) -> float:
        """Plain passes of such a batch per token of a row, of these rounds."""
        batch, spent, tokens = len(self.accept), 0.0, 0
        alone = verify(batch, 0)
        reports = [RoundReport(n, [4], [1] * 9, 0, (), batch) for n in range(batch)]
        for _ in range(rounds):
            chosen = [self.policy.next(report)[0] for report in reports]
            self.windows.append(chosen)
            width, drafting = max(chosen), sum(window > 0 for window in chosen)
            drafted = 0.01 * draft(drafting, width) if width else 0.0
            verified = 0.01 * verify(batch, width)
            spent += 100 * (drafted + verified)
            told, reports = 0, []
            for n, window in enumerate(chosen):
                misses = (k for k in range(window) if self.random.random() >= self.accept[n])
                run = next(misses, window)
                steps = []
                if window:
                    again = told > 0
                    steps.append(StepReport(2, window, 0, width, drafting, drafted, again))
                    told += 1
                steps.append(StepReport(1, window, run, width, batch, verified, n > 0))
                tokens += run + 1
                reports.append(RoundReport(n, [window], [1] * 9, run + 1, steps, batch))
        self.spent += spent / alone
        self.tokens += tokens
        return spent / alone / (tokens / batch)


@dataclass
class Served:
    """Rows whose texts end after 16 tokens, when another with a long prompt takes their place: the
    drafter reads a prompt as it comes, or, behind plain decoding, with all that it has missed."""

    policy: policies.WindowPolicy
    accept: float
    read: float  # passes of a token of a prompt
    rows: int = 4
    prompt: int = 200

    def __post_init__(self) -> None:
        self.random = random.Random(4)
        self.left, self.missed = [16 + 4 * n for n in range(self.rows)], [0] * self.rows
        self.reports = [RoundReport(n, [4], [1] * self.prompt, 0, (), self.rows)
                        for n in range(self.rows)]  # fmt: skip
        self.missed = [self.prompt] * self.rows

    def rounds(self, count: int) -> float:
        """Return the passes of these rounds per token of a row; plain decoding takes 1."""
        spent, tokens = 0.0, 0
        for _ in range(count):
            windows = [self.policy.next(report)[0] for report in self.reports]
            width = max(windows)
            reading, drafted = 0.0, draft(self.rows, width)
            if width:
                reading, self.missed = self.read * sum(self.missed), [0] * self.rows
            verified = verify(self.rows, width)
            spent += reading + drafted + verified
            for n in range(self.rows):
                misses = (k for k in range(width) if self.random.random() >= self.accept)
                run = min(next(misses, width), self.left[n] - 1)
                tokens += run + 1
                self.left[n] -= run + 1
                self.missed[n] += 0 if width else run + 1
                if self.left[n] == 0:
                    self.left[n], self.missed[n] = 16, self.prompt
                    self.reports[n] = RoundReport(n, [4], [1] * self.prompt, 0, (), self.rows)
                    continue
                steps = [StepReport(1, width, run, width, self.rows, 0.01 * verified, n > 0)]
                if width:
                    seconds, again = 0.01 * drafted, n > 0
                    steps.insert(0, StepReport(2, width, 0, width, self.rows, seconds, again))
                if reading:
                    steps.insert(0, StepReport(2, 0, 0, 0, 1, 0.01 * reading, True))
                self.reports[n] = RoundReport(n, [width], [1] * 9, run + 1, steps, self.rows)
        return spent / (tokens / self.rows)


@pytest.mark.parametrize("name", [*BY_TIMES, "cached-fsm", "fixed"])
def test_prompts_that_the_drafter_reads_count(name: str) -> None:
    """Rounds of drafting gain, and lose more where the drafter reads prompts of short answers."""
    if name in BY_TIMES:
        gains = Served(policies.named(name), 0.8, 0.0)
        gains.rounds(100)
        assert gains.rounds(1000) < 0.75
    loses = Served(policies.POLICIES[name](guard=True), 0.8, 0.01)
    loses.rounds(100)
    assert loses.rounds(3000) < 1.03


@pytest.mark.parametrize("name", BY_TIMES)
def test_windows_shrink_as_rows_become_more(name: str) -> None:
    """6 tokens are best for one row, 3 for two, 2 for three, 0 for eight."""
    chosen = []
    for batch, window in ((1, 6), (2, 3), (3, 2), (8, 0)):
        accept = [0.8] * batch
        assert best(accept)[0] == window
        run = Rows(policies.named(name), accept)
        run.texts(300)
        assert run.texts(300) <= best(accept)[1] * 1.03
        chosen.append(statistics.mode(row[0] for row in run.windows[-300:]))
        assert abs(chosen[-1] - window) <= (1 if batch == 1 else 0)
    assert chosen[1:] == [3, 2, 0]


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("name", [*BY_TIMES, "cached-fsm", "fixed"])
def test_no_batch_is_slower_than_its_plain_decoding(name: str, accept: float) -> None:
    """Eight rows fill a pass: each token more costs what a plain one does, and the draft."""
    assert best([accept] * 8)[0] == 0
    run = Rows(policies.POLICIES[name](guard=True), [accept] * 8)
    run.texts(60)
    first, tokens = run.spent, run.tokens / 8
    assert first - tokens < 32  # passes, of all rounds until drafting is known to lose
    run.texts(2000)
    assert run.spent - first < 1.02 * (run.tokens / 8 - tokens)
    assert [0] * 8 in run.windows[60:]


@pytest.mark.parametrize("name", BY_TIMES)
def test_a_row_that_would_gain_does_not_slow_the_others_down(name: str) -> None:
    """One of eight rows is nearly always accepted: alone it would ask for many tokens, and the
    seven others would wait for them."""
    accept = [0.97] + [0.05] * 7
    run = Rows(policies.named(name), accept)
    run.texts(60)
    assert all(len(set(row)) == 1 for row in run.windows)
    assert run.texts(1500) < 1.02
    alone = Rows(policies.named(name), accept[:1])
    alone.texts(60)
    assert alone.texts(300) < 0.5


@pytest.mark.parametrize("name", BY_TIMES)
def test_what_most_rows_gain_counts(name: str) -> None:
    """Two of three rows accept much: the third waits for them, and all are faster by it."""
    accept = [0.9, 0.9, 0.1]
    window, each = best(accept)
    assert window > 0
    run = Rows(policies.named(name), accept)
    run.texts(200)
    assert run.texts(400) < each * 1.12 < 0.95


@pytest.mark.parametrize("name", BY_TIMES)
def test_another_batch_is_measured_anew(name: str) -> None:
    """What one prompt gains says nothing of eight: plain decoding of such a batch is timed, then
    two tokens, before windows are chosen; and the policy speculates again for one."""
    policy = policies.named(name)
    one = Rows(policy, [0.8])
    one.texts(200)
    assert one.windows[-1][0] > 4
    many = Rows(policy, [0.8] * 8)
    many.texts(50)
    assert many.windows[:2] == [[0] * 8, [2] * 8]
    assert [0] * 8 in many.windows[2:5]  # looked at again behind the first round, which is slower
    assert many.windows[-30:] == [[0] * 8] * 30
    assert many.spent < many.tokens / 8 + 16
    again = Rows(policy, [0.8])
    again.texts(400)
    assert again.windows[-1][0] > 4


class Told:
    """Keeps what a policy is told of batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def next(self, report: RoundReport) -> Sequence[int]:
        self.batches.append(report.batch)
        return report.windows


def test_reports_tell_how_many_rows_take_a_round_together() -> None:
    levels = [toy_rows.Rows(20, 11 + i, scale=1.5) for i in range(2)]
    told = Told()
    chain = ps.Chain(levels, [1], policy=told)
    chain.generate([[1, 2], [3], [4]], [4, 30, 30], eos_token_id=[])
    assert told.batches[:3] == [3, 3, 3]
    assert told.batches[-1] in (1, 2)
    assert told.batches == sorted(told.batches, reverse=True)
    told.batches.clear()
    chain.generate([1, 2], 6, eos_token_id=[])
    assert set(told.batches) == {1}
