"""Windows that change before every round: reports, and rows apart from each other's windows."""

from collections.abc import Sequence
from typing import Any

import pytest
import toy_rows
from toy_policies import Random

import polyspec_ext as ps

# Step by step; and without host synchronisation, as on a device.
EXECUTORS = pytest.mark.parametrize("at_once", [False, True])


def make(count: int, vocab: int, at_once: bool) -> list[Any]:
    kind = toy_rows.Staying if at_once else toy_rows.Rows
    return [kind(vocab, 11 + i) for i in range(count)]


def test_reports() -> None:
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
        assert last in range(20)  # of the last round, which is not observed
        prompt_reads = [step.level for step in own[0].steps if step.repeated and step.batch == 1]
        assert prompt_reads in ([2], [2, 3])
    assert {report.batch for report in policy.reports} == {1, 2}  # rows in the last round
    both = [r.steps for r in policy.reports if r.steps and r.steps[-1].batch == 2]
    assert {step.repeated for steps in both for step in steps} == {False, True}


@EXECUTORS
def test_rows_do_not_see_each_others_windows(at_once: bool) -> None:
    prompts = [[1], [4, 2], [7, 7, 7]]

    def run(prompts: Sequence[list[int]], seeds: list[int], numbers: list[int]) -> ps.Output:
        policy = Random(2, largest=5)
        choose = policy.next
        policy.next = lambda report: choose(report._replace(request=numbers[report.request]))
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
