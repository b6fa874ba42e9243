"""Trees in chains: the distribution is the target's, by enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import toy
from toy_trees import TreeDrafter, TreeEnumerator, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters.base import DrafterCapabilities

V = 3
PROMPT = [0, 1]


def enumerated(
    count: int,
    window: Sequence[int],
    widths: Sequence[int],
    length: int,
    *,
    drawn: bool = False,
    temperature: float = 1.0,
    vocab: int = V,
    chance: TreeEnumerator | None = None,
    **options: Any,
) -> float:
    """Total variation of a chain's text to the target's; `count` levels above a tree drafter."""
    chance = chance or TreeEnumerator()
    levels = [TreeLevel(vocab, 11 + i) for i in range(count)]
    drafter = TreeDrafter(toy.ToyLevel(vocab, 31), widths, chance.sample if drawn else None)
    chain = ps.Chain([*levels, drafter], window, operators=chance.operators, **options)
    target = levels[0].table
    return toy.chain_gap(chance, chain, target, PROMPT, length, temperature=temperature)


SHAPES = [
    (1, [2], [2, 2], 3),
    (1, [3], [2, 1, 1], 4),
    (1, [1], [3], 3),
    (2, [2, 2], [2, 1], 3),
    (2, [3, 1], [2], 3),
    (3, [2, 1, 1], [2], 3),
]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("count", "window", "widths", "length"), SHAPES, ids=str)
def test_the_distribution_is_the_targets(count, window, widths, length, rule) -> None:
    assert enumerated(count, window, widths, length, rule=rule) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("count", "window", "widths", "length"),
    [(1, [2], [2, 1], 3), (1, [1], [2], 2), (2, [1, 1], [2], 2)],
    ids=str,
)
def test_the_distribution_with_independent_children(count, window, widths, length, rule) -> None:
    distance = enumerated(count, window, widths, length, drawn=True, vocab=2, rule=rule)
    assert distance < 1e-12


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


# ---- what is refused -----------------------------------------------------------------------------


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
    drafter.reserve_span = drafter.note_lengths = None  # type: ignore[attr-defined]
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
