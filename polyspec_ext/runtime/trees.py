"""A tree of draft tokens on its way from the drafter to the level above it, step by step.

A state row counts what is pending by the depth that a path can have: its text holds one of the
longest paths until the verification says which one stands. The nodes themselves are kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..drafters.base import DraftBlock, RowBuffer
from ..ops.schedule import HostStep


class Tree(NamedTuple):
    """The trees of a batch that are pending.

    Attributes:
        tokens, parents: ``[B, N]`` int64 on the CPU, as of `DraftBlock`; what lies behind a row's
            own nodes is 0 and -1.
        counts: nodes by row.
        rows: what the nodes were drawn from (`DraftBlock.rows`); None: they are deterministic.
        longest: ``[B, D]`` int64, tokens of a longest path, then -1.
        depths: ``[B]`` int64, its length.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: list[int]
    rows: RowBuffer | None
    longest: torch.Tensor
    depths: torch.Tensor

    def path_to(self, row: int, node: int) -> list[int]:
        """Tokens from the root's child to `node`."""
        tokens, parents, path = self.tokens[row], self.parents[row], []
        while node >= 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        return path[::-1]


def pending_tree(name: str, block: DraftBlock, lengths: Sequence[int], vocab_size: int) -> Tree:
    """The trees of a draft, if the level above can verify them.

    Args:
        name: of the drafter, for messages.
        lengths: ``[B]``, nodes that a path may have; 0: the row has no part.
        vocab_size: ids of the level above are below it.

    Raises:
        ValueError: names the drafter, what was expected and what came.
    """
    assert block.parents is not None
    batch, nodes = block.tokens.shape
    if tuple(block.parents.shape) != (batch, nodes):
        raise ValueError(
            f"{name}: expected parents of shape {[batch, nodes]}, as of the tokens, given "
            f"{list(block.parents.shape)}"
        )
    if block.rows is not None and tuple(block.rows.logits.shape[:2]) != (batch, nodes + 1):
        raise ValueError(
            f"{name}: expected draft logits of a tree of shape [B, N+1, Vd] = "
            f"[{batch}, {nodes + 1}, Vd], given {list(block.rows.logits.shape)}"
        )
    tokens, parents = block.tokens.tolist(), block.parents.tolist()
    counts = [nodes] * batch if block.counts is None else block.counts.tolist()
    counts = [count if length else 0 for count, length in zip(counts, lengths, strict=True)]
    longest: list[list[int]] = []
    for own, above, count, most in zip(tokens, parents, counts, lengths, strict=True):
        if not 0 <= count <= nodes:
            raise ValueError(f"{name}: expected 0 to {nodes} nodes, given {count}")
        longest.append(_longest_path(name, own[:count], above[:count], most, vocab_size))
    depths = [len(path) for path in longest]
    width = max(1, *depths)
    known = torch.arange(nodes) < torch.tensor(counts)[:, None]
    return Tree(
        block.tokens.cpu().where(known, 0),
        block.parents.cpu().where(known, -1),
        counts,
        block.rows,
        torch.tensor([path + [-1] * (width - len(path)) for path in longest]),
        torch.tensor(depths),
    )


def _longest_path(
    name: str, tokens: Sequence[int], parents: Sequence[int], most: int, vocab_size: int
) -> list[int]:
    paths: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: expected token ids in [0, {vocab_size}), given {token}")
        if not -1 <= parent < node:
            raise ValueError(
                f"{name}: expected the parent of node {node} in [-1, {node}), given {parent}"
            )
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    longest = max(paths, key=len, default=[])
    if len(longest) > most:
        raise ValueError(f"{name}: expected a tree of at most {most} levels, given {len(longest)}")
    return longest


class TreePass(NamedTuple):
    """What a level reads of a tree: in each row first what it lags behind, a chain, then the nodes.

    Attributes:
        tokens, parents: ``[B, T]`` int64, as of `InputBlock`.
        counts: tokens of each row; lags: of these, those in front of the tree.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: list[int]
    lags: list[int]

    @property
    def first(self) -> list[int]:
        """The token behind whose logits the tree begins, by row."""
        return [max(lag - 1, 0) for lag in self.lags]

    def in_text_order(self, states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """``[B, max(lags) + D, H]``: of what was read, ``[B, T, H]``, the lag and the path.

        Args:
            path: ``[B, D]`` nodes, then -1.
        """
        lags = torch.tensor(self.lags, device=states.device)[:, None]
        reach = torch.arange(max(self.lags) + path.shape[1], device=states.device)[None]
        nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0
        at = torch.where(reach < lags, reach, lags + nodes).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))


def tree_pass(step: HostStep, tree: Tree) -> TreePass:
    """The pass that verifies `tree`."""
    lags = [count - length for count, length in zip(step.counts, step.lengths, strict=True)]
    counts = [lag + nodes for lag, nodes in zip(lags, tree.counts, strict=True)]
    width = max(counts)
    tokens = torch.zeros(len(lags), width, dtype=torch.int64)
    parents = torch.arange(-1, width - 1).repeat(len(lags), 1)
    given = torch.from_numpy(step.input_ids)
    for row, (lag, nodes) in enumerate(zip(lags, tree.counts, strict=True)):
        tokens[row, :lag] = given[row, :lag]
        tokens[row, lag : lag + nodes] = tree.tokens[row, :nodes]
        # The root's children follow the last token of the lag.
        parents[row, lag : lag + nodes] = tree.parents[row, :nodes] + lag
    return TreePass(tokens, parents, counts, lags)
