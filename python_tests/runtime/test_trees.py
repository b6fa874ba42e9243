"""Trees in chains: the distribution is the target's, by enumeration."""

from dataclasses import replace

import pytest
import toy
from toy_trees import TreeDrafter, TreeEnumerator, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters.base import DrafterCapabilities

V = 3
PROMPT = [0, 1]


def test_statistics_count_levels_of_the_tree_and_nodes() -> None:
    chance = TreeEnumerator()
    drafter = TreeDrafter(toy.ToyLevel(V, 31), [2, 2])
    level = TreeLevel(V, 11)
    chain = ps.Chain([level, drafter], [2], operators=chance.operators)
    stats = next(chain.generate(PROMPT, 7).stats for _ in chance.runs())
    target, own = stats.levels
    assert own.num_proposed_tokens == 6 * target.draft_length_histogram[2] + sum(
        2 * n for n in target.draft_length_histogram[1:2]
    )
    assert target.num_draft_tokens_per_pos[0] == target.num_drafts
    assert target.num_emitted_tokens == 7
    assert level.most == 6


def test_levels_without_trees_are_named() -> None:
    drafter = TreeDrafter(toy.ToyLevel(V, 31), [2])
    operators = TreeEnumerator().operators
    with pytest.raises(ValueError, match=r"^plain: expected a level that reads trees, as tree dra"):
        ps.Chain([TreeLevel(V, 1), toy.ToyLevel(V, 2, name="plain"), drafter], operators=operators)
    # Only the level above the drafter reads them.
    ps.Chain([toy.ToyLevel(V, 2), TreeLevel(V, 1), drafter], operators=operators)

    class OnDevice(TreeLevel):
        capabilities = replace(TreeLevel(V, 1).capabilities, keeps_lengths=True)
        reserve_span = note_lengths = None

    level = OnDevice(V, 1)
    drafter.capabilities = replace(drafter.capabilities, keeps_lengths=True)
    drafter.reserve_span = drafter.note_lengths = None
    with pytest.raises(
        ValueError, match=r"^sync_each_step: .* since tree drafts trees of any size"
    ):
        ps.Chain([level, drafter], operators=operators, sync_each_step=False)


def test_a_tree_from_a_drafter_of_chains_is_named() -> None:
    chance = TreeEnumerator()
    drafter = TreeDrafter(toy.ToyLevel(V, 31), [2])
    drafter.capabilities = DrafterCapabilities()
    chain = ps.Chain([TreeLevel(V, 1), drafter], [2], operators=chance.operators)
    for _ in chance.runs():
        with pytest.raises(ValueError, match=r"^tree: expected a chain of tokens"):
            chain.generate(PROMPT, 8)
