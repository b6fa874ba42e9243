"""The steps of a round that are known before its tokens are, and how many tokens they can read."""

import toy

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.runtime.graphs import width_at
from polyspec_ext.runtime.plan import RoundPlan, default_rounds, round_plan


def test_plans() -> None:
    assert round_plan((3,), (0,)) == RoundPlan((3,), (2, 1), (3,), (1, 2))
    assert round_plan((0,), (0,)) == RoundPlan((0,), (1,), (0,), (1,))
    two = round_plan((6, 2), (2, 0))
    assert two.steps == (3, 2, 3, 2, 1)
    assert two.max_pending == (6, 2)
    assert [width_at(two, place) for place in range(5)] == [3, 4, 3, 4, 7]
    assert (two.levels, two.drafts, two.asked) == (3, 2, (1, 2, 3))
    # A window that is full early bounds the pending tokens: at most one below it, and a block.
    assert round_plan((2, 4), (3, 0)).max_pending == (6, 4)
    deep = round_plan((8, 4, 2), (2, 2, 0))
    gather = (4, 3, 4, 3)
    assert deep.steps == (*gather, 2, *gather, 2, 1)
    assert deep.max_pending == (14, 6, 2)
    # A text runs ahead of the committed text by the pending tokens, a draft, and a bonus per level.
    assert deep.ahead >= sum(deep.max_pending) + deep.drafts + deep.levels


def test_a_tail_s_draft_may_be_the_drafter_s_first() -> None:
    """Then the drafter reads the target's pending tokens as well."""
    plan = round_plan((5, 0, 3), (5, 1, 0), 2)
    assert plan.steps == (2, 2, 2, 2, 2, 4, 1)
    assert [width_at(plan, place) for place in (4, 5, 6)] == [2 + 2, 4 + 5, 1 + 5 + 2]
    # Where there is no room for a token of every level, or with smaller windows in one row.
    plan = round_plan((2, 2, 2), (1, 1, 0), 1)
    assert plan.steps == (4, 3, 2, 4, 1)
    assert [width_at(plan, place) for place in (0, 3)] == [4, 4 + 4 - 0]
    three = round_plan((4, 2), (2, 0), 2)
    assert [width_at(three, place) for place in (0, 4)] == [3, 3]


def test_default_rounds() -> None:
    assert default_rounds([]) == default_rounds([4]) == []
    windows = [[8, 4], [5, 3], [5, 4], [9, 4], [4, 4], [0, 3], [3, 0], [16, 8, 4]]
    rounds = [[2], [2], [1], [2], [1], [1], [3], [2, 2]]
    assert [default_rounds(each) for each in windows] == rounds
    assert ps.Chain(toy.make_levels(3), [8, 4]).rounds == [2]


def test_windows_and_rounds_of_the_shipped_chain() -> None:
    chain = tiny.chain()
    assert (tuple(chain.window), tuple(chain.rounds)) == ((5, 3), (3,))
    assert tiny.chain(window=[6, 2]).rounds == [2]
    assert tiny.chain(rounds=[1]).rounds == [1]
    assert tiny.chain(("target", "drafter")).rounds == []
