"""Several drafters of one target: right caches, the target's law, the better drafter."""

from collections.abc import Sequence

import pytest
import toy
import toy_rows
from toy_policies import Turns
from toy_trees import TreeDrafter

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.policies import (
    DrafterChoice,
    Fixed,
    RoundReport,
    StepReport,
)


def test_members_that_are_the_target_accept_everything() -> None:
    """A cache that has missed tokens, or kept rejected tokens, would lower the acceptance."""
    levels = [toy.ToyLevel(50, 3) for _ in range(3)]
    other = toy.ToyLevel(50, 9)
    drafter = ps.SwitchingDrafter(
        [DraftModel(levels[1]), ps.PromptLookup(), DraftModel(other), DraftModel(levels[2])]
    )
    policy = Turns(drafter)
    chain = ps.Chain([levels[0], drafter], [3], policy=policy)
    out = chain.generate([1], 200, 0.9, seed=4)
    assert policy.drafters == {0, 1, 2, 3}
    text = out.sequences[0].tolist()
    for level in (levels[1], levels[2], other):
        assert len(level.cache) > 100
        assert level.cache == text[: len(level.cache)]

    class Honest(Turns):
        def next(self, report: RoundReport) -> Sequence[int]:
            windows = super().next(report)
            self.drafter.active = 3 * (self.drafter.active % 2)  # the two that are the target
            return windows

    chain = ps.Chain([levels[0], drafter], [3], policy=Honest(drafter))
    target = chain.generate([1], 200, 0.9, seed=4).stats.levels[0]
    assert target.num_accepted_tokens == target.num_draft_tokens > 0


class Members:
    """Two drafters that are not there; the first is better until the round `change`."""

    members = (None, None)

    def __init__(self) -> None:
        self.active = 0


def chosen(choice: DrafterChoice, rounds: int, change: int) -> list[int]:
    drafter, seen = choice.drafter, []
    report, text = RoundReport(0, [4], [1, 2], 0), [1, 2]
    for number in range(rounds):
        choice.next(report)
        seen.append(drafter.active)
        good = (drafter.active == 0) == (number < change)
        run = 4 if good else number % 2
        text = [*text, *[3] * (run + 1)]
        steps = [StepReport(2, 4, 0, 4, 1, 4e-3), StepReport(1, 4, run, 4, 1, 1e-2)]
        report = RoundReport(0, [4], text, run + 1, steps)
    return seen


def test_bandit_finds_the_better_drafter_and_the_change() -> None:
    choice = DrafterChoice(Members(), lambda: Fixed(), stay=2)
    seen = chosen(choice, 600, 300)
    assert seen[100:300].count(0) > 180
    assert seen[400:].count(1) > 180
    assert 1 in seen[:20]


def test_rows_of_a_round_have_one_drafter() -> None:
    choice = DrafterChoice(Members(), lambda: Fixed(), stay=2)
    reports = [RoundReport(row, [4], [1, 2], 0, batch=3) for row in range(3)]
    tried = set()
    for number in range(40):
        active = []
        for report in reports:
            choice.next(report)
            active.append(choice.drafter.active)
        assert len(set(active)) == 1
        tried |= set(active)
        steps = [StepReport(2, 4, 0, 4, 3, 4e-3), StepReport(1, 4, 1, 4, 3, 1e-2)]
        text = [1, 2, *[3] * (2 * number + 2)]
        reports = [RoundReport(row, [4], text, 2, steps, 3) for row in range(3)]
    assert tried == {0, 1}


def test_what_cannot_be_a_member() -> None:
    with pytest.raises(ValueError, match="vocab_size: expected that of the level above"):
        ps.SwitchingDrafter([ps.PromptLookup(), ps.PromptLookup()])
    level, other = toy_rows.make(2)
    with pytest.raises(ValueError, match=r"members\[1\]: .* cache of its own, given toy 11 again"):
        ps.SwitchingDrafter([DraftModel(level), DraftModel(level)])
    with pytest.raises(ValueError, match=r"levels\[1\]: .*given levels\[0\] again"):
        ps.Chain([level, ps.SwitchingDrafter([DraftModel(other), DraftModel(level)])])
    trees = TreeDrafter(toy.ToyLevel(9, 31), [2])
    with pytest.raises(ValueError, match=r"^tree: expected a drafter of chains, given one "):
        ps.SwitchingDrafter([ps.PromptLookup(), trees])
    lookup = ps.PromptLookup()
    lookup.trees = True
    with pytest.raises(ValueError, match="expected a drafter of chains, given one of trees"):
        ps.SwitchingDrafter([ps.PromptLookup(), lookup], vocab_size=9)
