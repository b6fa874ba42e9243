"""A tree of draft tokens on its way from the drafter through the verification by the level above.

A state row counts what is pending by the depth that a path can have: its text holds one of the
longest paths until the verification says which one stands. The nodes themselves are kept here.

All but `require_tree` is tensor code whose shapes do not depend on the trees, and waits for no
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..arguments import require_ids
from ..drafters.base import DraftBlock, RowBuffer
from ..drafters.trees import require_parents
from ..kv_cache.masks import ancestors
from ..tensors import RowParameters
from .requirements import ChainConfig
from .state import Step


class Tree(NamedTuple):
    """The trees of a batch that are pending.

    Attributes:
        tokens, parents: ``[B, N]`` int64, as of `DraftBlock`; what lies behind a row's own nodes is
            0 and -1.
        counts: ``[B]`` int64, nodes of each row.
        longest: ``[B, D]`` int64, tokens of a longest path, then -1.
        depths: ``[B]`` int64, its length.
        drawn: as of `DraftBlock`.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    longest: torch.Tensor
    depths: torch.Tensor
    drawn: torch.Tensor | None

    def path_to(self, row: int, node: int) -> list[int]:
        """Tokens from the root's child to `node`."""
        tokens, parents, path = self.tokens[row], self.parents[row], []
        while node >= 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        return path[::-1]


def require_tree(name: str, block: DraftBlock, lengths: Sequence[int], vocab_size: int) -> None:
    """Refuse what the level above cannot verify. Reads the tree on the host.

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
    counts = [nodes] * batch if block.counts is None else block.counts.tolist()
    for tokens, parents, count, most in zip(
        block.tokens.tolist(), block.parents.tolist(), counts, lengths, strict=True
    ):
        if not 0 <= count <= nodes:
            raise ValueError(f"{name}: expected 0 to {nodes} nodes, given {count}")
        if most:
            require_ids(name, tokens[:count], vocab_size)
            require_parents(name, parents[:count], most)


def pending_tree(block: DraftBlock, lengths: torch.Tensor, most: int) -> Tree:
    """The trees of a draft.

    Args:
        lengths: ``[B]`` int64 on the block's device, nodes that a path may have; 0: the row has no
            part.
        most: D, the largest of these.
    """
    assert block.parents is not None
    (batch, nodes), device = block.tokens.shape, block.tokens.device
    index = torch.arange(nodes, device=device)
    counts = torch.full_like(lengths, nodes) if block.counts is None else block.counts
    counts = torch.where(lengths > 0, counts, 0)
    known = index < counts[:, None]
    tokens = torch.where(known, block.tokens, 0)
    parents = torch.where(known, block.parents, -1)
    longest = tokens.new_full((batch, most + 1), -1)
    depths = torch.zeros_like(counts)
    if nodes:
        seen = ancestors(parents, most)
        depth = torch.where(known, seen.sum(-1), 0)
        last = (depth * nodes - index).argmax(1, keepdim=True)  # of equal depths the first
        depths = depth.gather(1, last)[:, 0]
        line = seen.gather(1, last[..., None].expand(-1, -1, nodes))[:, 0] & known
        # Behind the last column stands what is not on the path.
        longest.scatter_(1, torch.where(line, depth - 1, most).clamp_max(most), tokens)
    return Tree(tokens, parents, counts, longest[:, :most].contiguous(), depths, block.drawn)


class TreePass(NamedTuple):
    """What a level reads of a tree: in each row first what it lags behind, a chain, then the nodes.

    Attributes:
        tokens, parents: ``[B, T]`` int64, as of `InputBlock`.
        counts: ``[B]`` int64, tokens of each row; lags: of these, those in front of the tree.
        lag: no row lags by more.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    lags: torch.Tensor
    lag: int

    @property
    def first(self) -> torch.Tensor:
        """The token behind whose logits the tree begins, by row."""
        return (self.lags - 1).clamp_min(0)

    def in_text_order(self, states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """``[B, lag + D, H]``: of what was read, ``[B, T, H]``, the lag and the path.

        Args:
            path: ``[B, D]`` nodes, then -1.
        """
        lags = self.lags.to(states.device)[:, None]
        reach = torch.arange(self.lag + path.shape[1], device=states.device)[None]
        nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0
        at = torch.where(reach < lags, reach, lags + nodes).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))

    def along(
        self, logits: torch.Tensor, hidden: Mapping[int, torch.Tensor] | None, result: Any
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None]:
        """Logits and hidden states of the pass, of the path that stands, in text order.

        Args:
            result: of `verify_tree`.
        """
        drawn = result.rows.clamp_min(0)[..., None]
        logits = logits.gather(1, drawn.expand(-1, -1, logits.shape[2]))
        if hidden is not None:
            hidden = {
                layer: self.in_text_order(states, result.path.to(states.device))
                for layer, states in hidden.items()
            }
        return logits, hidden


def tree_pass(
    input_ids: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, tree: Tree, lag: int
) -> TreePass:
    """The pass that verifies `tree`.

    Args:
        input_ids: ``[B, T]`` int64, what the level has not read of each text, with one of the
            longest paths of its tree.
        counts: ``[B]`` int64, tokens of each row; lengths: of these, those of the path.
        lag: no row has more tokens in front of the path.
    """
    nodes, device = tree.tokens.shape[1], input_ids.device
    lags = counts - lengths
    own = torch.where(counts > 0, tree.counts, 0)[:, None]
    reach = torch.arange(lag + nodes, device=device)
    place = reach - lags[:, None]  # the node that stands there
    inside = (place >= 0) & (place < own)
    given = input_ids[:, reach.clamp_max(input_ids.shape[1] - 1)]
    at = place.clamp(0, max(nodes - 1, 0))
    tokens, parents = torch.where(place < 0, given, 0), (reach - 1).expand_as(given)
    if nodes:
        tokens = torch.where(inside, tree.tokens.gather(1, at), tokens)
        # The root's children follow the last token of the lag.
        parents = torch.where(inside, tree.parents.gather(1, at) + lags[:, None], parents)
    return TreePass(tokens, parents, lags + own[:, 0], lags, lag)


def verify_tree(
    config: ChainConfig,
    step: Step,
    logits: torch.Tensor,
    tree: Tree,
    rows: RowBuffer | None,
    parameters: RowParameters,
    target_to_draft: torch.Tensor | None = None,
) -> Any:
    """A level verifies the trees that are pending for it.

    Args:
        logits: ``[B, N + 1, V]``, its own: row 0 behind the root, row i + 1 behind node i.
        rows: ``[B, N + 1, Vd]``, what the children behind each of these were drawn from, where
            `tree.drawn` does not say otherwise; None: they are deterministic.
        target_to_draft: as of `steps.verify`.

    Returns:
        what `steps.verify` returns, tokens ``[B, D + 1]``, with `path` ``[B, D]``, the nodes that
        stand, and `rows` ``[B, D + 1]``, the row of `logits` that each token was drawn from; -1
        behind them. D, the most nodes that a path may have, is the step's `most`, or N.
    """
    batch, nodes = tree.tokens.shape
    device = logits.device
    own = step.on(device)
    pool = None
    ids = statistics = None
    if rows is not None:
        # Row i of a request's own, one request behind the other.
        pool = rows.logits.reshape(-1, rows.logits.shape[2])
        ids = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)
        if tree.drawn is not None:
            ids = torch.where(tree.drawn.to(device), ids, -1)
        statistics = None if rows.statistics is None else rows.statistics.reshape(-1, 2)
    return config.operators.verify_tree(
        logits,
        tree.tokens.to(device),
        tree.parents.to(device),
        pool,
        counts=tree.counts.to(device),
        draft_rows=ids,
        draft_statistics=statistics,
        depth=min(step.most, nodes),
        **parameters.on(device),
        position=own.positions,
        level=step.level,
        round=own.rounds,
        target_to_draft=None if pool is None else target_to_draft,
    )
