"""The guard of the policies, by simulated costs: plain decoding where drafting loses, at a bounded
price, and drafting where it wins."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from polyspec_ext import policies
from polyspec_ext.policies import RoundReport, StepReport

BY_TIMES = ["online", "joint"]


FREE = 8  # rows whose drafts take the time of one row's


@dataclass(frozen=True)
class Costs:
    """In passes of the target that read a token of one row."""

    verify: Callable[[int], float]  # of a pass of the target that reads so many tokens
    draft: float = 0.1  # of a drafted token
    read: float = 0.0  # of a token that the drafter has missed

    def drafts(self, batch: int, window: int) -> float:
        return self.draft * window * max(1.0, batch / FREE)


# A 1.5B target and a 0.5B draft on a processor without instructions for 8-bit products: a token
# more in a pass costs nearly a pass.
NARROW = Costs(lambda tokens: 0.07 + 0.93 * tokens, 0.36, 0.12)
WIDE = Costs(lambda tokens: 0.98 + 0.02 * tokens, 0.1, 0.001)
# Of 8 tokens memory bounds the time, from there on arithmetic does.
SHARED = Costs(lambda tokens: max(1.0, tokens / 8))


def best(costs: Costs, accept: Sequence[float]) -> tuple[int, float]:
    """The window of the least time per token and row, and that time."""
    batch = len(accept)

    def each(window: int) -> float:
        tokens = sum(sum(a**i for i in range(window + 1)) for a in accept) / batch
        return (costs.verify(batch * (window + 1)) + costs.drafts(batch, window)) / tokens

    window = min(range(17), key=each)
    return window, each(window)


@dataclass
class Rows:
    """A batch of texts. Each ends after `answer` tokens, and another follows: the drafter reads its
    prompt as it comes, or, after plain decoding, with all missed tokens."""

    policy: policies.WindowPolicy
    accept: Sequence[float]  # by row
    costs: Costs = SHARED
    prompt: int = 40
    answer: int = 10**9
    windows: list[list[int]] = field(default_factory=list)  # of each round, by row
    spent: float = 0.0
    tokens: int = 0
    caught_up: list[int] = field(default_factory=list)  # missed tokens, by reading

    def __post_init__(self) -> None:
        self.random, self.batch = random.Random(3), len(self.accept)
        self.left = [self.answer + 4 * n for n in range(self.batch)]
        self.missed = [self.prompt] * self.batch
        self.reports = [self.begun(n) for n in range(self.batch)]

    def begun(self, row: int) -> RoundReport:
        return RoundReport(row, [4], [1] * self.prompt, 0, (), self.batch)

    def rounds(self, count: int) -> float:
        """Return the passes of these rounds per token of a row; plain decoding takes 1."""
        spent, tokens = self.spent, self.tokens
        for _ in range(count):
            chosen = [self.policy.next(report)[0] for report in self.reports]
            self.windows.append(chosen)
            width, drafting = max(chosen), sum(window > 0 for window in chosen)
            unread = [m for m, w in zip(self.missed, chosen, strict=True) if w and m >= 8]
            self.caught_up += unread
            reading, drafted = self.costs.read * sum(unread), self.costs.drafts(drafting, width)
            verified = self.costs.verify(sum(window + 1 for window in chosen))
            self.spent += reading + drafted + verified
            told = 0
            for n, window in enumerate(chosen):
                misses = (k for k in range(window) if self.random.random() >= self.accept[n])
                run = min(next(misses, window), self.left[n] - 1)
                self.tokens += run + 1
                self.left[n] -= run + 1
                self.missed[n] = 0 if window else self.missed[n] + run + 1
                steps = [StepReport(1, window, run, window, self.batch, 0.01 * verified, n > 0)]
                if window:
                    seconds, again = 0.01 * drafted, told > 0
                    steps.insert(0, StepReport(2, window, 0, width, drafting, seconds, again))
                    told += 1
                if reading:
                    steps.insert(0, StepReport(2, 0, 0, 0, 1, 0.01 * reading, True))
                self.reports[n] = RoundReport(n, [window], [1] * 9, run + 1, steps, self.batch)
                if self.left[n] == 0:
                    self.left[n], self.missed[n] = self.answer, self.prompt
                    self.reports[n] = self.begun(n)
        return (self.spent - spent) / (self.tokens - tokens) * self.batch


@pytest.mark.parametrize("length", [40, 1000])
@pytest.mark.parametrize("accept", [0.0, 0.3, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("name", BY_TIMES)
def test_drafting_that_loses_costs_little(name: str, accept: float, length: int) -> None:
    """At most 1.03 times plain decoding, and after the first texts no more than `guard_share`."""
    assert best(NARROW, [accept])[0] == 0
    run = Rows(policies.named(name), [accept], NARROW, answer=length)
    run.rounds(1000)
    assert run.spent < 1.03 * run.tokens
    assert sum(w > 0 for (w,) in run.windows) < 10
    first, tokens = run.spent - run.tokens, run.tokens
    run.rounds(8000)
    assert run.spent - run.tokens < first + 0.02 * (run.tokens - tokens)
    assert sum(w > 0 for (w,) in run.windows) > 4  # it has asked again


@pytest.mark.parametrize("name", [*BY_TIMES, "cached-fsm", "fixed"])
def test_plain_passes_are_timed_by_themselves(name: str) -> None:
    """Any pass with drafts takes nearly three plain passes: a line through all widths would
    overrate the cost of plain passes, and count losses as gains."""
    costs = Costs(lambda tokens: 2.8 + 0.1 * tokens if tokens > 1 else 1.0, 0.3, 0.01)
    assert best(costs, [0.85])[0] == 0
    assert Rows(policies.POLICIES[name](guard=True), [0.85], costs, answer=40).rounds(1000) < 1.04


@pytest.mark.parametrize("accept", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("name", BY_TIMES)
def test_drafting_that_wins_is_as_fast_as_the_best_window(name: str, accept: float) -> None:
    run = Rows(policies.named(name), [accept], WIDE, answer=1000)
    assert run.rounds(1000) < best(WIDE, [accept])[1] / 0.97


@pytest.mark.parametrize("name", BY_TIMES)
def test_trials_become_rare_and_are_paid_for(name: str) -> None:
    """Count the tokens from trial to trial; a trial costs that share of them."""
    run = Rows(policies.named(name), [0.5], replace(NARROW, read=0.0))
    run.rounds(8000)
    plain = [len(list(g)) for drafts, g in itertools.groupby(run.windows, any) if not drafts]
    assert len(plain) > 5
    assert plain[3:-1] == sorted(plain[3:-1])
    assert plain[-2] > 500


@pytest.mark.parametrize("name", BY_TIMES)
def test_a_drafter_far_behind_waits_for_the_next_text(name: str) -> None:
    """To read missed tokens costs more with every token, and is cheapest at the begin of a text."""
    run = Rows(policies.named(name), [0.7], NARROW, answer=4000)
    run.rounds(3900)
    assert run.caught_up == [41]
    run.rounds(200)
    assert run.caught_up == [41, 41]


def test_texts_that_end_before_drafts_have_paid_for_the_prompt() -> None:
    """Drafting wins token by token, but not the time in which the drafter reads the prompts."""
    costs = replace(WIDE, read=0.05)
    run = Rows(policies.Joint(), [0.6], costs, prompt=400, answer=8)
    run.rounds(2400)
    assert len(run.caught_up) < 6
    run = Rows(policies.Joint(), [0.6], costs, prompt=400, answer=400)
    run.rounds(2000)
    assert len(run.caught_up) >= run.tokens // 400 >= 10


@pytest.mark.parametrize("name", [*BY_TIMES, "cached-fsm", "fixed"])
def test_prompts_that_the_drafter_reads_count(name: str) -> None:
    """Rounds of drafting gain, and lose more where the drafter reads prompts of short answers."""
    if name in BY_TIMES:
        gains = Rows(policies.named(name), [0.8] * 4, prompt=200, answer=16)
        gains.rounds(100)
        assert gains.rounds(1000) < 0.75
    policy, costs = policies.POLICIES[name](guard=True), replace(SHARED, read=0.01)
    loses = Rows(policy, [0.8] * 4, costs, prompt=200, answer=16)
    loses.rounds(100)
    assert loses.rounds(3000) < 1.03


@pytest.mark.parametrize("name", BY_TIMES)
@pytest.mark.parametrize(("rows", "accept", "pays"), [(2, 0.8, True), (8, 0.8, False)])
def test_one_row_reads_for_the_first_drafts_of_a_batch(name, rows, accept, pays) -> None:
    """Where the drafter takes long to read prompts, and drafting does not pay, only one is read;
    the others are read at once where it pays."""
    costs = replace(SHARED, read=0.05)
    run = Rows(policies.named(name), [accept] * rows, costs, prompt=200, answer=400)
    run.rounds(3)
    assert len(run.caught_up) == (rows if pays else 1)
    each = run.rounds(1500)
    assert each < 0.9 if pays else 1 <= each < 1.02


@pytest.mark.parametrize("name", BY_TIMES)
def test_windows_shrink_as_rows_become_more(name: str) -> None:
    """6 tokens are best for one row, 3 for two, 2 for three, 0 for eight."""
    chosen = []
    for batch, window in ((1, 6), (2, 3), (3, 2), (8, 0)):
        accept = [0.8] * batch
        assert best(SHARED, accept)[0] == window
        run = Rows(policies.named(name), accept)
        run.rounds(300)
        assert run.rounds(2000) <= best(SHARED, accept)[1] * 1.03
        chosen.append(statistics.mode(row[0] for row in run.windows[-300:]))
        assert abs(chosen[-1] - window) <= (1 if batch == 1 else 0)
    assert chosen[1:] == [3, 2, 0]


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("name", [*BY_TIMES, "cached-fsm", "fixed"])
def test_no_batch_is_slower_than_its_plain_decoding(name: str, accept: float) -> None:
    """Fill a pass with eight rows: each further token costs as much as a plain one, and the
    draft."""
    assert best(SHARED, [accept] * 8)[0] == 0
    run = Rows(policies.POLICIES[name](guard=True), [accept] * 8)
    run.rounds(60)
    first, tokens = run.spent, run.tokens / 8
    assert first - tokens < 32  # passes, of all rounds until drafting is known to lose
    run.rounds(2000)
    assert run.spent - first < 1.02 * (run.tokens / 8 - tokens)
    assert [0] * 8 in run.windows[60:]


@pytest.mark.parametrize("name", BY_TIMES)
def test_a_row_that_would_gain_does_not_slow_the_others_down(name: str) -> None:
    """Have a row of eight nearly always accepted: alone it would ask for many tokens, and the
    seven others would wait for them."""
    accept = [0.97] + [0.05] * 7
    run = Rows(policies.named(name), accept)
    run.rounds(60)
    assert all(len(set(row)) == 1 for row in run.windows if row != [2] + [0] * 7)
    assert run.rounds(1500) < 1.02
    alone = Rows(policies.named(name), accept[:1])
    alone.rounds(60)
    assert alone.rounds(300) < 0.5


@pytest.mark.parametrize("name", BY_TIMES)
def test_another_batch_is_measured_anew(name: str) -> None:
    """Gains of one prompt do not predict gains of eight: plain decoding of eight is timed, then
    two tokens, before windows are chosen; and the policy speculates again for one."""
    policy = policies.named(name)
    one = Rows(policy, [0.8])
    one.rounds(200)
    assert one.windows[:2] == [[0], [2]]  # plainly, and then few tokens
    assert one.windows[-1][0] > 4
    many = Rows(policy, [0.8] * 8)
    many.rounds(50)
    assert many.windows[:3] == [[0] * 8, [2] + [0] * 7, [2] * 8]
    assert [0] * 8 in many.windows[3:6]  # tried again after the first round, which is slower
    assert many.windows[-30:] == [[0] * 8] * 30
    assert many.spent < many.tokens / 8 + 16
    again = Rows(policy, [0.8])
    again.rounds(400)
    assert again.windows[-1][0] > 4
