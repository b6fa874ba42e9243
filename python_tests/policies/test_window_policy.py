"""Windows that change before every round: the distribution stays the target's, and windows of 0
grow again.

The policies below choose windows out of the text so far, so what a chain emits decides how it goes
on; only what is over may be looked at (contract C2).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import proposal_kinds
import pytest
import toy
import toy_rows

import polyspec_ext as ps
from polyspec_ext.policies import RoundReport, WindowPolicy

RULES = ["token", "block"]
# Step by step; and without host synchronisation, as on a device.
EXECUTORS = pytest.mark.parametrize("at_once", [False, True])


class Random:
    """A random function of the request, the text and `seed`, each window in 0 ... `largest`.

    Attributes:
        seen: the windows chosen, by request.
    """

    def __init__(self, seed: int = 0, largest: int = 3) -> None:
        self.seed, self.largest = seed, largest
        self.seen: dict[int, list[list[int]]] = {}
        self.reports: list[RoundReport] = []

    def next(self, report: RoundReport) -> Sequence[int]:
        chance = random.Random(str((self.seed, report.request, list(report.text))))
        windows = [chance.randint(0, self.largest) for _ in report.windows]
        self.seen.setdefault(report.request, []).append(windows)
        self.reports.append(report._replace(text=list(report.text)))
        return windows


class Listed:
    """The windows of a list, one after another and from the beginning again."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        self.windows, self.at = windows, 0

    def next(self, report: RoundReport) -> Sequence[int]:
        if report.committed == 0:
            self.at = 0
        self.at += 1
        return self.windows[(self.at - 1) % len(self.windows)]


def make(count: int, vocab: int, at_once: bool) -> list[Any]:
    kind = toy_rows.Staying if at_once else toy_rows.Rows
    return [kind(vocab, 11 + i) for i in range(count)]


def gap(
    made: Sequence[Any],
    window: list[int],
    policy: WindowPolicy,
    length: int,
    at_once: bool,
    **options: Any,
) -> float:
    """Total variation of the text to the target's."""
    enumerator, chain = proposal_kinds.enumerated(
        made, window, policy=policy, sync_each_step=not at_once, **options
    )
    return toy.chain_gap(enumerator, chain, made[0], [0, 1], length)


# ---- the distribution ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@EXECUTORS
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("count", "length"), [(2, 5), (3, 4)])
def test_law_under_a_random_policy(count, length, seed, at_once, rule) -> None:
    made, policy = make(count, 2, at_once), Random(seed)
    assert gap(made, [2] * (count - 1), policy, length, at_once, rule=rule) < 1e-12
    for level in range(count - 1):
        assert {windows[level] for windows in policy.seen[0]} == {0, 1, 2, 3}


# Every level sits out, alone and together, and is asked again.
GROWING: list[tuple[list[list[int]], int]] = [
    ([[1], [0], [2]], 5),
    ([[0], [0], [3]], 5),
    ([[1, 1], [0, 2], [1, 1]], 4),
    ([[1, 1], [2, 0], [1, 2]], 4),
    ([[0, 0], [1, 0], [0, 3], [2, 1]], 5),
]


@pytest.mark.parametrize("rule", RULES)
@EXECUTORS
@pytest.mark.parametrize(("windows", "length"), GROWING, ids=str)
def test_law_where_windows_of_zero_grow_again(windows, length, at_once, rule) -> None:
    made = make(len(windows[0]) + 1, 2, at_once)
    assert gap(made, windows[0], Listed(windows), length, at_once, rule=rule) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_law_without_a_bound_on_rounds(rule: str) -> None:
    made, windows = make(3, 2, False), Listed([[2, 1], [0, 0], [1, 1]])
    assert gap(made, [2, 1], windows, 4, False, rule=rule, rounds=[0]) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@EXECUTORS
def test_law_of_rows_with_windows_of_their_own(at_once: bool, rule: str) -> None:
    made, policy, prompts = make(3, 2, at_once), Random(5, largest=2), [[0, 1], [1, 1]]
    enumerator, chain = proposal_kinds.enumerated(
        made, [1, 1], policy=policy, rule=rule, sync_each_step=not at_once
    )
    for others in (0, -1):
        found = proposal_kinds.text_distributions(
            enumerator, chain, prompts, 3, others, temperature=1.0
        )
        assert proposal_kinds.distance(found, made[0], prompts, 3, [1.0, 1.0]) < 1e-12
    assert policy.seen[0] != policy.seen[1]


# ---- what a policy is told, and what becomes of its windows --------------------------------------


def test_reports() -> None:
    """Reports come per row and round: committed text, new tokens and steps of the last round."""
    policy = Random(3)
    levels = [toy_rows.Rows(20, 11 + i, scale=1.5) for i in range(3)]
    prompts = [[1, 2], [3]]
    out = ps.Chain(levels, [3, 2], policy=policy).generate(prompts, [30, 12], 1.0, seed=[1, 2])
    for number, prompt in enumerate(prompts):
        first, *own = [report for report in policy.reports if report.request == number]
        text = out.sequences[number].tolist()
        assert (list(first.windows), first.committed, first.steps) == ([3, 2], 0, [])
        at = len(prompt)
        for report, windows in zip(own, policy.seen[number], strict=False):
            at += report.committed
            assert report.text == text[:at]
            assert list(report.windows) == windows
            # (A level with a window of 0 sits out, and so does one where little is left.)
            assert {step.level for step in report.steps} <= {3, 2, 1}
            assert report.committed == report.steps[-1].accepted + 1
            assert all(step.seconds > 0 for step in report.steps)
            assert all(step.tokens <= step.width for step in report.steps)
        assert at < len(prompt) + out.requests[number].num_new_tokens
        accepted = sum(report.steps[-1].accepted for report in own)
        last = out.requests[number].levels[0].num_accepted_tokens - accepted
        assert last in range(20)  # of the last round, which is not told
        prompt_reads = [step.level for step in own[0].steps if step.repeated and step.batch == 1]
        assert prompt_reads in ([2], [2, 3])
    both = [r.steps for r in policy.reports if r.steps and r.steps[-1].batch == 2]
    assert {step.repeated for steps in both for step in steps} == {False, True}


@EXECUTORS
def test_rows_do_not_see_each_others_windows(at_once: bool) -> None:
    """A row drafts as much as it would alone, whatever the others' windows."""
    prompts = [[1], [4, 2], [7, 7, 7]]

    def run(prompts: Sequence[list[int]], seeds: list[int], numbers: list[int]) -> ps.Output:
        policy = Random(2, largest=5)
        choose = policy.next
        policy.next = lambda report: choose(  # type: ignore[method-assign]
            report._replace(request=numbers[report.request])
        )
        chain = ps.Chain(make(3, 20, at_once), [2, 2], policy=policy, sync_each_step=not at_once)
        return chain.generate(prompts, 30, 1.0, seed=seeds, eos_token_id=[])

    together = run(prompts, [3, 4, 5], [0, 1, 2])
    for number, prompt in enumerate(prompts):
        alone = run([prompt], [3 + number], [number])
        assert together.logprobs[number] == alone.logprobs[0]
        length = len(prompt) + 30
        assert together.sequences[number, :length].tolist() == alone.sequences[0].tolist()
        pairs = zip(together.requests[number].levels, alone.requests[0].levels, strict=True)
        for mine, own in pairs:
            assert mine.draft_length_histogram == own.draft_length_histogram
            assert mine.emitted_per_verification == own.emitted_per_verification
