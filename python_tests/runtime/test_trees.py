"""Trees in chains: the distribution is the target's, by enumeration, and mistakes show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import toy
from toy_trees import TreeDrafter, TreeEnumerator, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters.base import DraftBlock, DrafterCapabilities, DraftInput
from polyspec_ext.drafters.trees import PendingTree
from polyspec_ext.runtime.rows import PendingRows

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


# ---- known mistakes ------------------------------------------------------------------------------


def wrong_node(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the node in front of the one that stands."""
    keep = TreeLevel.keep_path

    def wrong(self: TreeLevel, begin: Any, path: torch.Tensor, lengths: Any) -> Any:
        cache = [list(own) for own in self.caches]
        kept = keep(self, begin, path, lengths)
        for b, own in enumerate(self.caches):
            if int(path[b, 0]) > 0 and len(own) > int(begin[b]):
                own[int(begin[b])] = cache[b][int(begin[b]) + int(path[b, 0]) - 1]
        return kept

    patch.setattr(TreeLevel, "keep_path", wrong)


def sibling_for_a_parent(patch: pytest.MonkeyPatch) -> None:
    """A node is read as the child of the one in front of it."""
    make = PendingTree.read_after

    def wrong(*given: Any) -> Any:
        made = make(*given)
        chain = torch.arange(-1, made.parents.shape[1] - 1)
        return made._replace(parents=chain.expand_as(made.parents))

    patch.setattr(PendingTree, "read_after", wrong)


def rows_of_other_nodes(patch: pytest.MonkeyPatch) -> None:
    """What is handed up are the first rows, and not those of the path."""
    verify = TreeEnumerator.verify_tree

    def wrong(self: TreeEnumerator, *given: Any, **options: Any) -> Any:
        r = verify(self, *given, **options)
        order = torch.arange(r.rows.shape[1]).expand_as(r.rows)
        return r._replace(rows=order.where(r.rows >= 0, -1))

    patch.setattr(TreeEnumerator, "verify_tree", wrong)
    patch.setattr(
        TreeEnumerator, "_statistics", lambda self, target, made, options: made.statistics
    )
    # (Statistics of the right rows would show the mistake as an error.)
    take = PendingRows.take

    def without_statistics(self: PendingRows, number: int, device: torch.device) -> Any:
        rows = take(self, number, device)
        return None if rows is None else rows._replace(statistics=None)

    patch.setattr(PendingRows, "take", without_statistics)


def rows_of_other_parents(patch: pytest.MonkeyPatch) -> None:
    """Children are verified against the row that another node's were drawn from."""
    verify = TreeEnumerator.verify_tree

    def wrong(self: TreeEnumerator, *given: Any, draft_rows: Any, **options: Any) -> Any:
        if draft_rows is not None:
            draft_rows = draft_rows.clone()
            draft_rows[:, 1:] = draft_rows[:, :1]
        return verify(self, *given, draft_rows=draft_rows, **options)

    patch.setattr(TreeEnumerator, "verify_tree", wrong)


@pytest.mark.parametrize(
    ("mistake", "given", "options"),
    [
        (wrong_node, (1, [2], [2, 2], 3), {}),
        (sibling_for_a_parent, (1, [2], [2, 2], 3), {}),
        (rows_of_other_nodes, (2, [2, 2], [2, 1], 3), {}),
        (rows_of_other_parents, (1, [2], [2, 1], 3), {"drawn": True, "vocab": 2}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_mistakes_are_seen(monkeypatch, mistake, given, options) -> None:
    with monkeypatch.context() as patch:
        mistake(patch)
        assert enumerated(*given, **options) > 1e-3


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


# ---- wrong trees ---------------------------------------------------------------------------------


def tree(tokens: list[int], parents: list[int], **options: Any) -> DraftBlock:
    return DraftBlock(torch.tensor([tokens]), parents=torch.tensor([parents]), **options)


WRONG = [
    (tree([0, 5], [-1, 0]), r"token ids in \[0, 3\), given 5"),
    (tree([0, 1], [-1, 1]), r"the parent of node 1 in \[-1, 1\), given 1"),
    (tree([0, 1, 2], [-1, 0, 1]), "a tree of at most 2 levels, given 3"),
    (tree([0, 1], [-1, 0, 1]), r"parents of shape \[1, 2\]"),
    (tree([0], [-1], counts=torch.tensor([2])), "0 to 1 nodes, given 2"),
]


@pytest.mark.parametrize(("block", "text"), WRONG, ids=[text[:20] for _, text in WRONG])
def test_wrong_trees_are_named(block: DraftBlock, text: str) -> None:
    class Wrong(TreeDrafter):
        def draft(self, inputs: DraftInput) -> DraftBlock:
            return block

    chance = TreeEnumerator()
    drafter = Wrong(toy.ToyLevel(V, 31), [2])
    chain = ps.Chain([TreeLevel(V, 1), drafter], [2], operators=chance.operators)
    for _ in chance.runs():
        with pytest.raises(ValueError, match=f"^tree: expected {text}"):
            chain.generate(PROMPT, 8)
    drafter.capabilities = DrafterCapabilities()
    chain = ps.Chain([TreeLevel(V, 1), drafter], [2], operators=chance.operators)
    with pytest.raises(ValueError, match=r"^tree: expected a chain of tokens"):
        chain.generate(PROMPT, 8)
