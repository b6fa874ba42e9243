"""Trees of drafted tokens against their definition, written down recursively."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import toy
from toy_trees import TreeDrafter, TreeLevel, likeliest_tree

import polyspec_ext as ps
from polyspec_ext.drafters.trees import Nodes

V = 7
Path = tuple[int, ...]


class Table:
    """A draft model with the drafted path as its state; the logits follow the path."""

    def __init__(self, batch: int, depth: int, scale: float = 1.0) -> None:
        self.batch, self.depth, self.scale = batch, depth, scale

    def logits(self, row: int, path: Path) -> torch.Tensor:
        seed = hash((row, path)) % 2**31
        return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * self.scale

    def root(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([self.logits(b, ()) for b in range(self.batch)])
        return rows, torch.full((self.batch, 1, self.depth), -1.0)

    def expand(self, tokens, states, depth, ancestors) -> tuple[torch.Tensor, torch.Tensor]:
        out = states.clone()
        out[:, :, depth - 1] = tokens
        paths = [[tuple(int(x) for x in own if x >= 0) for own in row] for row in out]
        rows = [torch.stack([self.logits(b, path) for path in own]) for b, own in enumerate(paths)]
        return out, torch.stack(rows)


def paths_of(nodes: Nodes, row: int) -> list[Path]:
    found: list[Path] = []
    for i in range(int(nodes.counts[row])):
        parent = int(nodes.parents[row, i])
        assert parent < i
        found.append((*(found[parent] if parent >= 0 else ()), int(nodes.tokens[row, i])))
    return found


@pytest.mark.parametrize(("k", "depth", "total"), [(3, 4, 12), (2, 1, 9), (4, 3, 60), (1, 5, 4)])
def test_dynamic_tree(k: int, depth: int, total: int) -> None:
    table = Table(2, depth)
    nodes = ps.DynamicTree(k, total).grow(
        *table.root(), torch.tensor([depth, depth]), depth, table.expand
    )
    for row in range(2):
        found = paths_of(nodes, row)
        assert len(set(found)) == len(found)
        assert set(found) == likeliest_tree(partial(table.logits, row), k, depth, total)
        for i, path in enumerate(found):  # children of one parent from the likeliest on
            own = table.logits(row, path[:-1])
            rest = [other[-1] for other in found[i + 1 :] if other[:-1] == path[:-1]]
            assert all(own[path[-1]] >= own[token] for token in rest)


def test_nothing_follows_a_row_without_a_distribution() -> None:
    """The children are the least likely ids, and every other node's parent is in the tree."""

    class Broken(Table):
        def logits(self, row: int, path: Path) -> torch.Tensor:
            own = super().logits(row, path)
            least = super().logits(row, ()).topk(3).indices[2]  # of the rows read
            return torch.full_like(own, math.nan) if path == (least,) else own

    table = Broken(2, 3)
    nodes = ps.DynamicTree(3, 9).grow(*table.root(), torch.tensor([3, 3]), 3, table.expand)
    for row in range(2):
        found = paths_of(nodes, row)
        assert len(set(found)) == len(found) == 8
        for path in found:
            assert len(path) == 1 or path[:-1] in found
            assert not table.logits(row, path[:-1]).isnan().any()


@pytest.mark.parametrize("tree", [ps.DynamicTree(3, 12), ps.StaticTree([[0], [0, 0], [1], [0, 1]])])
def test_rows_of_different_depth(tree: Any) -> None:
    table = Table(3, 3)
    nodes = tree.grow(*table.root(), torch.tensor([3, 0, 1]), 3, table.expand)
    assert int(nodes.counts[1]) == 0
    assert {len(path) for path in paths_of(nodes, 2)} == {1}
    alone = tree.grow(*table.root(), torch.tensor([3, 3, 3]), 3, table.expand)
    assert paths_of(alone, 0) == paths_of(nodes, 0)


def test_a_certain_child_never_comes_without_its_parent() -> None:
    """Probabilities of 1 tie a node with its parent, and all further down."""
    table = Table(1, 5, scale=0.0)
    certain = torch.zeros(V)
    certain[2] = 1e4
    table.logits = lambda row, path: certain
    for total in range(2, 9):
        nodes = ps.DynamicTree(2, total).grow(*table.root(), torch.tensor([5]), 5, table.expand)
        found = paths_of(nodes, 0)
        assert found[: min(total - 1, 1)] == [(2,)]
        assert (2,) * min(total - 1, 5) in found


def test_static_tree() -> None:
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 2]]
    table = Table(2, 3)
    tree = ps.StaticTree(list(reversed(paths)))
    nodes = tree.grow(*table.root(), torch.tensor([3, 3]), 3, table.expand)

    def tokens(row: int, ranks: Sequence[int]) -> Path:
        path: Path = ()
        for rank in ranks:
            path = (*path, int(table.logits(row, path).topk(rank + 1).indices[-1]))
        return path

    for row in range(2):
        assert set(paths_of(nodes, row)) == {tokens(row, ranks) for ranks in paths}
    # A window below the tree's depth cuts it.
    nodes = tree.grow(*table.root(), torch.tensor([2, 2]), 2, table.expand)
    assert nodes.tokens.shape == (2, 6)


VOCAB = 3
PROMPT = [0, 1]


class Proposer:
    name, trees = "proposer", True

    def __init__(self, proposal: ps.Proposal | None = None) -> None:
        self.proposal = proposal

    def propose(self, context: ps.Context, k: int) -> Any:
        return self.proposal


def test_a_batched_drafter_drafts_what_its_capabilities_say() -> None:
    class Straight(TreeDrafter):
        def draft(self, inputs: Any) -> Any:
            return replace(super().draft(inputs), parents=None)

    chain = ps.Chain([TreeLevel(VOCAB, 1), Straight(toy.ToyLevel(VOCAB, 31), [1])], [1])
    with pytest.raises(ValueError, match=r"^tree: expected a tree .* have `trees`, given a chain"):
        chain.generate(PROMPT, 8)


def test_ids_that_the_level_above_lacks_go_with_what_is_behind_them() -> None:
    class Fixed:
        name, trees = "fixed", True

        def propose(self, context: ps.Context, k: int) -> ps.Proposal:
            tokens, parents = [3, 0, 1, 2], [-1, -1, 0, 1]
            shown = 4 if k > 1 else 2
            return ps.Proposal(tokens[:shown], parents=parents[:shown])

    for window in ([2, 2], [4, 2]):
        levels = [TreeLevel(4, 11), TreeLevel(3, 12)]
        out = ps.Chain([*levels, Fixed()], window).generate(PROMPT, 20, eos_token_id=[])
        alone = ps.Chain([toy.ToyLevel(4, 11)]).generate(PROMPT, 20, eos_token_id=[])
        assert out.sequences.equal(alone.sequences)
        assert levels[1].most == 2  # nodes 0 and 2


WRONG: list[tuple[Any, type[Exception], str]] = [
    (ps.Proposal([0, 1], parents=[-1]), ValueError, "as many parents as tokens, 2, given 1"),
    (ps.Proposal([0, 1], parents=[-1, 1]), ValueError, r"the parent of node 1 in \[-1, 1\), given"),
    (ps.Proposal([0, 1], parents=[-1, -2]), ValueError, r"of node 1 in \[-1, 1\), given -2"),
    (ps.Proposal([0, 1, 2], parents=[-1, 0, 1]), ValueError, "a tree of at most 2 levels, given 3"),
    (ps.Proposal([1, 1], parents=[-1, -1]), ValueError, "the children of a node to differ"),
    (ps.Proposal([0, 9], parents=[-1, 0]), ValueError, r"token ids in \[0, 3\), given 9"),
    (ps.Proposal([0], parents=[0.5]), TypeError, r"parents: expected an integer, given 0\.5"),
    (ps.Proposal([0], torch.zeros(1, 1, VOCAB), [-1]), ValueError, r"shape \[1, 2, Vd\]"),
    (
        ps.Proposal([0], torch.zeros(1, 2, VOCAB), [-1], torch.zeros(1, 1, 2).long()),
        ValueError,
        r"statistics of shape \[1, 2, 2\]",
    ),
]


@pytest.mark.parametrize(("proposal", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_trees_are_named(proposal: ps.Proposal, error: type[Exception], text: str) -> None:
    chain = ps.Chain([TreeLevel(VOCAB, 1), Proposer(proposal)], [2])
    with pytest.raises(error, match=f"^proposer: .*{text}"):
        chain.generate(PROMPT, 8, temperature=1.0)


def test_a_drafter_says_that_it_proposes_trees() -> None:
    drafter = Proposer(ps.Proposal([0, 1], parents=[-1, -1]))
    drafter.trees = False
    chain = ps.Chain([TreeLevel(VOCAB, 1), drafter], [2])
    with pytest.raises(ValueError, match=r"^proposer: expected a chain .* without `trees = True`"):
        chain.generate(PROMPT, 8)
    with pytest.raises(ValueError, match="expected a level that reads trees, as proposer drafts"):
        ps.Chain([toy.ToyLevel(VOCAB, 1), Proposer()], [2])
