"""Trees of draft tokens, from the drafter to the verification by the level above.

A state row counts pending tokens by the depth of a path: its text has one of the longest paths
until a verification has accepted one. `Tree` has the nodes.

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


class Tree(NamedTuple):
    """The trees of a batch that are pending.

    Attributes:
        tokens, parents: ``[B, N]`` int64, as of `DraftBlock`; 0 and -1 behind the nodes of a row.
        counts: ``[B]`` int64, nodes of each row.
        longest: ``[B, D]`` int64, tokens of a longest path, then -1.
        depths: ``[B]`` int64, its length.
        drawn: as of `DraftBlock`.
        again: ``[B, N]`` bool, nodes without children that an earlier sibling equals; None: none,
            or not asked for. Such a node counts among the draws and is never accepted.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    longest: torch.Tensor
    depths: torch.Tensor
    drawn: torch.Tensor | None
    again: torch.Tensor | None = None

    def proposal(
        self, rows: RowBuffer | None, most: int, device: torch.device
    ) -> tuple[tuple[torch.Tensor | None, ...], dict[str, Any]]:
        """Return the arguments of `ops.verify_tree` behind the target's logits.

        Args:
            rows: ``[B, N + 1, Vd]``, distributions of the children of the root and of each node,
                where `drawn` does not say otherwise; None: all are deterministic.
            most: nodes that a path may have.
            device: of the target's logits.
        """
        batch, nodes = self.tokens.shape
        pool = ids = statistics = None
        if rows is not None:
            # The rows of one request behind those of the other.
            pool = rows.logits.reshape(-1, rows.logits.shape[2])
            ids = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)
            if self.drawn is not None:
                ids = torch.where(self.drawn.to(device), ids, -1)
            statistics = None if rows.statistics is None else rows.statistics.reshape(-1, 2)
        return (self.tokens.to(device), self.parents.to(device), pool), {
            "counts": self.counts.to(device),
            "draft_rows": ids,
            "draft_statistics": statistics,
            "depth": min(most, nodes),
        }

    def path_to(self, row: int, node: int) -> list[int]:
        """Return the tokens from the root's child to `node`."""
        tokens, parents, path = self.tokens[row], self.parents[row], []
        while node >= 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        return path[::-1]


def require_tree(name: str, block: DraftBlock, lengths: Sequence[int], vocab_size: int) -> None:
    """Refuse trees that the level above, with `vocab_size` ids, cannot verify. Reads them on the
    host.

    Args:
        name: of the drafter, for messages.
        lengths: ``[B]``, nodes that a path may have; 0: the row takes no part.
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
    """Return the trees of a draft.

    Args:
        lengths: ``[B]`` int64, nodes that a path may have; 0: the row takes no part. The trees are
            on their device.
        most: D, the largest of these.
    """
    assert block.parents is not None
    (batch, nodes), device = block.tokens.shape, lengths.device
    index = torch.arange(nodes, device=device)
    counts = torch.full_like(lengths, nodes) if block.counts is None else block.counts.to(device)
    counts = torch.where(lengths > 0, counts, 0)
    known = index < counts[:, None]
    tokens = torch.where(known, block.tokens.to(device), 0)
    parents = torch.where(known, block.parents.to(device), -1)
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


def with_repeats(tree: Tree) -> Tree:
    """Return the tree with the nodes that need not be read (`Tree.again`). Reads it on the host."""
    tokens, parents = tree.tokens, tree.parents
    index = torch.arange(tokens.shape[1])
    known = index < tree.counts[:, None]
    alike = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    earlier = alike & (index[:, None] > index)
    inner = (parents[:, None] == index[:, None]) & known[:, None]
    again = earlier.any(2) & known & ~inner.any(2)
    return tree._replace(again=again) if bool(again.any()) else tree


class TreePass(NamedTuple):
    """Input of a level that reads a tree: in each row first a chain, its lag, then the nodes.

    Attributes:
        tokens, parents: ``[B, T]`` int64, as of `InputBlock`.
        counts: ``[B]`` int64, tokens of each row; lags: of these, those in front of the tree.
        lag: no row lags by more.
        places: ``[B, N]`` int64, where each node of the tree lies among those that are read; None:
            all are.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    lags: torch.Tensor
    lag: int
    places: torch.Tensor | None = None

    def by_node(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the logits behind the root and every node of the tree, ``[B, N + 1, V]``."""
        rows = torch.nn.functional.pad(places + 1, (1, 0)).to(logits.device)
        return logits[torch.arange(len(rows), device=rows.device)[:, None], rows]

    def placed(self, path: torch.Tensor) -> torch.Tensor:
        """Return a path ``[B, D]`` by the nodes that are read; -1 stays."""
        if self.places is None or not self.places.shape[1]:
            return path
        places = self.places.to(path.device).gather(1, path.clamp_min(0))
        return torch.where(path >= 0, places, -1)

    @property
    def first(self) -> torch.Tensor:
        """Return the token behind whose logits the tree begins, by row."""
        return (self.lags - 1).clamp_min(0)

    def in_text_order(self, states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return lag and path of the states ``[B, T, H]`` of the pass, as ``[B, lag + D, H]``; the
        `path` is ``[B, D]`` nodes, then -1."""
        lags = self.lags.to(states.device)[:, None]
        reach = torch.arange(self.lag + path.shape[1], device=states.device)[None]
        nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0
        at = torch.where(reach < lags, reach, lags + nodes).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))

    def along(
        self,
        logits: torch.Tensor,
        hidden: Mapping[int, torch.Tensor] | None,
        result: Any,
        path: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None]:
        """Return logits and hidden states of the accepted path, in text order; `result` is of
        `verify_tree`, and `path` its path as `placed` has it."""
        drawn = result.rows.clamp_min(0)[..., None]
        logits = logits.gather(1, drawn.expand(-1, -1, logits.shape[2]))
        if hidden is not None:
            hidden = {
                layer: self.in_text_order(states, path.to(states.device))
                for layer, states in hidden.items()
            }
        return logits, hidden


def tree_pass(
    input_ids: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, tree: Tree, lag: int
) -> TreePass:
    """Return the pass that verifies `tree`.

    Args:
        input_ids: ``[B, T]`` int64, tokens that the level has not read, with one of the longest
            paths of the tree.
        counts: ``[B]`` int64, tokens of each row; lengths: of these, those of the path.
        lag: no row has more tokens in front of the path.
    """
    if tree.again is not None:
        return _without_repeats(input_ids, counts, lengths, tree, lag)
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


def _without_repeats(
    input_ids: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, tree: Tree, lag: int
) -> TreePass:
    """Return the pass over the nodes that must be read, in their order."""
    assert tree.again is not None
    index = torch.arange(tree.tokens.shape[1])
    read = ~tree.again & (index < tree.counts[:, None])
    order = (~read).to(torch.uint8).sort(dim=1, stable=True).indices
    left = read.sum(1)
    order = order[:, : int(left.max())]
    places = (read.cumsum(1) - 1).clamp_min(0)
    parents = tree.parents.gather(1, order)
    above = places.gather(1, parents.clamp_min(0))
    small = tree._replace(
        tokens=tree.tokens.gather(1, order),
        parents=torch.where(parents >= 0, above, -1),
        counts=left,
        again=None,
    )
    return tree_pass(input_ids, counts, lengths, small, lag)._replace(places=places)
