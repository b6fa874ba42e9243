"""Trees in a round: pending trees, and the passes that verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arguments
from ..drafters.base import DraftBlock, DrafterCapabilities, RowBuffer
from ..drafters.trees import require_parents
from ..levels.base import Hidden, InputBlock
from ..ops.trees import ancestors
from ..tensors import RowCounts
from .plan import ChainConfig
from .rows import PendingRows, Step


def append_tree(
    config: ChainConfig,
    can: DrafterCapabilities,
    pending: PendingRows,
    step: Step,
    block: DraftBlock,
) -> DraftBlock:
    """Make the trees of a draft pending, at a fixed address unless the host reads the rows; it then
    checks the trees, unless the drafter's capabilities (`can`) state that they are checked. Returns
    the longest paths as a draft of chains."""
    if can.trees != (block.parents is not None):
        form, actual = ("a tree", "a chain of tokens")[:: 1 if can.trees else -1]
        raise ValueError(
            f"{config.names[-1]}: expected {form} from a drafter whose capabilities "
            f"have {'' if can.trees else 'no '}`trees`, given {actual}"
        )
    if step.host is not None and not can.checked:
        require_tree(config.names[-1], block, step.host.lengths, config.vocab_sizes[-2])
    tree = PendingTree.of(block, step.plan.lengths, step.most)
    if step.host is None:
        tree = _fixed(tree, pending.trees.get(step.most, (None,))[0])
        pending.trees[step.most] = tree, block.rows
    elif block.rows is not None:
        tree = tree.with_repeats()
    pending.tree = tree
    return DraftBlock(tree.longest, tree.depths, rows=block.rows)


def _fixed(tree: PendingTree, known: PendingTree | None) -> PendingTree:
    """Return a tree in the memory of the `known` tree, if the shapes agree."""
    shapes = [[None if x is None else x.shape for x in group] for group in (known or (), tree)]
    if known is None or shapes[0] != shapes[1]:
        drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter overwrites it
        return tree._replace(drawn=drawn)
    for into, new in zip(known, tree, strict=True):
        if into is not None and new is not None:
            into.copy_(new)
    return known


def keep_path(member: Any, positions: Tensor, path: Tensor, lengths: RowCounts) -> Sequence[int]:
    """Keep a path of the trees at `positions` in the cache of a level or drafter (`keep_path`)."""
    # Idle rows keep all tokens.
    front = torch.minimum(positions, lengths.on(positions.device))
    begin = RowCounts.read(front, lengths.host is not None)
    cached: Sequence[int] = member.keep_path(begin, path.to(member.device), lengths)
    return cached


class PendingTree(NamedTuple):
    """The pending trees of a batch.

    Attributes:
        tokens, parents: ``[B, N]`` int64, as in `DraftBlock`; 0 and -1 after the nodes of a row.
        counts: ``[B]`` int64, nodes of each row.
        longest: ``[B, D]`` int64, tokens of a longest path, then -1.
        depths: ``[B]`` int64, length of the longest path.
        drawn: as in `DraftBlock`.
        again: ``[B, N]`` bool, childless nodes equal to an earlier sibling, which count as draws
            and are never accepted; None: no repeats, or not computed.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    longest: Tensor
    depths: Tensor
    drawn: Tensor | None
    again: Tensor | None = None

    @classmethod
    def of(cls, block: DraftBlock, lengths: Tensor, most: int) -> PendingTree:
        """Return the trees of a draft on the device of `lengths`, ``[B]`` int64: maximum nodes of a
        path, at most `most`, D; 0: the row idles."""
        assert block.parents is not None
        (batch, nodes), device = block.tokens.shape, lengths.device
        index = torch.arange(nodes, device=device)
        held = nodes if block.counts is None else block.counts.to(device)
        counts = torch.where(lengths > 0, held, 0)
        known = index < counts[:, None]
        tokens = torch.where(known, block.tokens.to(device), 0)
        parents = torch.where(known, block.parents.to(device), -1)
        longest = tokens.new_full((batch, most + 1), -1)
        depths = torch.zeros_like(counts)
        if nodes:
            seen = ancestors(parents, most)
            depth = torch.where(known, seen.sum(-1), 0)
            last = (depth * nodes - index).argmax(1, keepdim=True)  # the first of equal depths
            depths = depth.gather(1, last)[:, 0]
            line = seen.gather(1, last[..., None].expand(-1, -1, nodes))[:, 0] & known
            # The extra last column takes the nodes that are not on the path.
            longest.scatter_(1, torch.where(line, depth - 1, most).clamp_max(most), tokens)
        return cls(tokens, parents, counts, longest[:, :most].contiguous(), depths, block.drawn)

    def with_repeats(self) -> PendingTree:
        """Return the tree with its repeated nodes (`again`). Reads the tree on the host."""
        tokens, parents = self.tokens, self.parents
        index = torch.arange(tokens.shape[1])
        known = index < self.counts[:, None]
        alike = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
        earlier = alike & (index[:, None] > index)
        inner = (parents[:, None] == index[:, None]) & known[:, None]
        again = earlier.any(2) & known & ~inner.any(2)
        return self._replace(again=again) if bool(again.any()) else self

    def proposal(
        self, rows: RowBuffer | None, most: int, device: torch.device
    ) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Return the arguments of `ops.verify_tree` after the target's logits, for paths of at most
        `most` nodes. `rows` are ``[B, N + 1, Vd]``, distributions of the children of the root and
        of each node, except where `drawn` is False; None: all children are deterministic."""
        batch, nodes = self.tokens.shape
        pool = ids = statistics = None
        if rows is not None:
            # The rows of all requests in sequence.
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

    def texts(self, row: int, text: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield for the root and each node of a row with `text`: a slice of its row of the level's
        logits, and the text that this row follows."""
        for node in range(-1, int(self.counts[row])):
            path = text.new_tensor(self.path_to(row, node))
            yield slice(node + 1, node + 2), torch.cat([text, path])

    def read_after(self, input_ids: Tensor, counts: Tensor, lengths: Tensor, lag: int) -> TreePass:
        """Return the pass that verifies the trees. `input_ids` ``[B, T]`` are the level's unread
        tokens, `counts` ``[B]`` in each row, of which the last `lengths` ``[B]`` are a longest path
        of the tree; each row has at most `lag` tokens before the tree."""
        if self.again is not None:
            return self._read_without_repeats(self.again, input_ids, counts, lengths, lag)
        nodes, device = self.tokens.shape[1], input_ids.device
        lags = counts - lengths
        num_nodes = torch.where(counts > 0, self.counts, 0)[:, None]
        reach = torch.arange(lag + nodes, device=device)
        node = reach - lags[:, None]  # index of the node in each column
        inside = (node >= 0) & (node < num_nodes)
        ids = input_ids[:, reach.clamp_max(input_ids.shape[1] - 1)]
        at = node.clamp(0, max(nodes - 1, 0))
        tokens, parents = torch.where(node < 0, ids, 0), (reach - 1).expand_as(ids)
        if nodes:
            tokens = torch.where(inside, self.tokens.gather(1, at), tokens)
            # The root's children follow the last token of the lag.
            parents = torch.where(inside, self.parents.gather(1, at) + lags[:, None], parents)
        return TreePass(tokens, parents, lags + num_nodes[:, 0], lags, lag)

    def _read_without_repeats(
        self, again: Tensor, input_ids: Tensor, counts: Tensor, lengths: Tensor, lag: int
    ) -> TreePass:
        """Return the pass without repeated nodes, in their order."""
        index = torch.arange(self.tokens.shape[1])
        read = ~again & (index < self.counts[:, None])
        order = (~read).to(torch.uint8).sort(dim=1, stable=True).indices
        left = read.sum(1)
        order = order[:, : int(left.max())]
        places = (read.cumsum(1) - 1).clamp_min(0)
        parents = self.parents.gather(1, order)
        above = places.gather(1, parents.clamp_min(0))
        small = self._replace(
            tokens=self.tokens.gather(1, order),
            parents=torch.where(parents >= 0, above, -1),
            counts=left,
            again=None,
        )
        return small.read_after(input_ids, counts, lengths, lag)._replace(places=places)


def require_tree(name: str, block: DraftBlock, lengths: Sequence[int], vocab_size: int) -> None:
    """Refuse trees of a drafter that the level above, with `vocab_size` ids, cannot verify. Reads
    the trees on the host. Paths have at most ``lengths[b]`` nodes; 0: the row idles."""
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
            arguments.require_ids(name, tokens[:count], vocab_size)
            require_parents(name, parents[:count], most)


class TreePass(NamedTuple):
    """Input of a level that reads a tree: in each row a chain of unread tokens, then the nodes.

    Attributes:
        tokens, parents: ``[B, T]`` int64, as in `InputBlock`.
        counts: ``[B]`` int64, tokens of each row; lags: ``[B]``, tokens before the tree.
        lag: maximum of `lags`.
        places: ``[B, N]`` int64, index of each node of the tree among the nodes in the pass; None:
            the pass has all nodes.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    lags: Tensor
    lag: int
    places: Tensor | None = None

    def block(
        self,
        tokens: Tensor,
        device: torch.device,
        layers: tuple[int, ...],
        most: int,
        on_host: bool,
    ) -> InputBlock:
        """Return the block for a level on `device`: `tokens` in the level's ids, trees of at most
        `most` levels, and counts on the host as well if `on_host`."""
        return InputBlock(
            tokens,
            tokens.shape[1] - self.lag + 1,
            RowCounts.read(self.counts, on_host),
            RowCounts.read((self.lags - 1).clamp_min(0), on_host),
            self.parents.to(device),
            layers,
            self.lag + most,
        )

    def by_node(self, logits: Tensor) -> Tensor:
        """Return the logits after the root and every node of the tree, ``[B, N + 1, V]``."""
        if self.places is None:
            return logits
        rows = torch.nn.functional.pad(self.places + 1, (1, 0)).to(logits.device)
        return logits[torch.arange(len(rows), device=rows.device)[:, None], rows]

    def verified(
        self,
        verify: Callable[..., Any],
        proposed: tuple[tuple[Tensor | None, ...], dict[str, Any]],
        logits: Tensor,
        hidden: Hidden | None,
        shared: Mapping[str, Any],
    ) -> tuple[Any, Tensor, Hidden | None, Tensor]:
        """Verify a `proposal` by an operator like `ops.verify_tree` with the arguments `shared`.
        Returns its result; logits and hidden states of the accepted path, in text order; and the
        path as indices of the pass."""
        result = verify(logits, *proposed[0], **proposed[1], **shared)
        path: Tensor = result.path
        if self.places is not None and self.places.shape[1]:
            places = self.places.to(path.device).gather(1, path.clamp_min(0))
            path = torch.where(path >= 0, places, -1)
        drawn = result.rows.clamp_min(0)[..., None]
        logits = logits.gather(1, drawn.expand(-1, -1, logits.shape[2]))
        if hidden is not None:
            hidden = {
                layer: self._in_text_order(states, path.to(states.device))
                for layer, states in hidden.items()
            }
        return result, logits, hidden, path

    def _in_text_order(self, states: Tensor, path: Tensor) -> Tensor:
        # Select lag and path from the states [B, T, H]: [B, lag + D, H].
        lags = self.lags.to(states.device)[:, None]
        reach = torch.arange(self.lag + path.shape[1], device=states.device)[None]
        nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0
        at = torch.where(reach < lags, reach, lags + nodes).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))
