"""Trees of drafted tokens: trees grown level by level, EAGLE-2's dynamic tree and trees of fixed
shape; several paths of a draft model; and pending trees, which the level above verifies.

All of it is tensor code without host synchronisation. Children of grown trees are deterministic:
the likeliest tokens after their parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .. import arguments, rooms
from ..arguments import NODE_MAX
from ..errors import ERROR_BITS, RequestError
from ..levels.base import InputBlock, LevelOutput
from ..tensors import IdMap, RowCounts
from .base import DraftBlock, DraftInput, TreeSize
from .model import row_buffer

# From the tokens [B, n] of nodes, the states [B, n, H] after their parents, their depth (1:
# children of the root) and `ancestors` [B or 1, n, m] bool, which of the latest m nodes each sees,
# to the states and the logits [B, n, V] after the nodes.
Expand = Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


class Nodes(NamedTuple):
    """A tree block, as in `DraftBlock`.

    Attributes:
        tokens: ``[B, N]`` int64, parents before children, siblings by decreasing probability.
        parents: ``[B, N]`` int64, index of each node's parent, -1 for the root.
        counts: ``[B]`` int64; the nodes of row b are the first ``counts[b]``.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor

    def table(self) -> Tensor:
        """Concatenate all fields to ``[B, 2N + 1]``, for a single copy to the host."""
        return torch.cat([self.tokens, self.parents, self.counts[:, None]], 1)

    @classmethod
    def of(cls, table: Tensor) -> Nodes:
        """Return the nodes of a `table`."""
        count = table.shape[1] // 2
        return cls(table[:, :count], table[:, count:-1], table[:, -1])


@runtime_checkable
class Tree(Protocol):
    """The growth rule of a tree."""

    def grow(
        self, logits: Tensor, states: Tensor, lengths: Tensor, depth: int, expand: Expand
    ) -> Nodes:
        """Grow a tree below the root of each row.

        Args:
            logits: ``[B, V]``, after the root.
            states: ``[B, 1, H]``, after the root.
            lengths: ``[B]`` int64, maximum depth of row b's tree; 0: an inactive row.
            depth: maximum of `lengths`, as a host number.
            expand: reads a level of nodes.
        """
        ...

    def size(self, depth: int, vocab_size: int) -> TreeSize:
        """Return the size of a tree of at most `depth` levels, with `vocab_size` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): every level reads the `top_k` nodes of the
    largest cumulative probability, and each gets `top_k` children; of all nodes, the
    `total_tokens` - 1 of the largest cumulative probability are verified. A node is never more
    probable than its parent, so they are a tree.

    Its depth is the window of the level above (papers: 6 to 8).

    Args:
        top_k: 1 to 16383.
        total_tokens: tokens that the level above verifies, including the root; 2 to 16384.

    Raises:
        TypeError, ValueError: an argument is no integer or out of range.
    """

    top_k: int = 10
    total_tokens: int = 60

    def __post_init__(self) -> None:
        for name, least in (("top_k", 1), ("total_tokens", 2)):
            number = arguments.integer(name, getattr(self, name), NODE_MAX + least - 1, least)
            object.__setattr__(self, name, number)

    def grow(
        self, logits: Tensor, states: Tensor, lengths: Tensor, depth: int, expand: Expand
    ) -> Nodes:
        batch, device = logits.shape[0], logits.device
        k = min(self.top_k, logits.shape[-1])
        eye = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
        scores, tokens = _likeliest(logits, k)
        # Tokens and scores of all nodes by level, and the indices of the nodes that are read.
        all_tokens, all_scores = [tokens], [scores]
        read = [torch.arange(k, device=device).expand(batch, -1)][: depth - 1]
        ancestors, states = eye, states.expand(-1, k, -1)
        for level in range(1, depth):
            states, logits = expand(tokens, states, level, ancestors)
            gains, below = _likeliest(logits, k)
            below, below_scores = below.flatten(1), (scores[..., None] + gains).flatten(1)
            all_tokens.append(below)
            all_scores.append(below_scores)
            if level + 1 == depth:
                break
            scores, chosen = below_scores.topk(k)
            read.append(chosen + (k + (level - 1) * k * k))
            parent = (chosen // k)[..., None]
            tokens = below.gather(1, chosen)
            states = states.gather(1, parent.expand(-1, -1, states.shape[2]))
            seen = ancestors.gather(1, parent.expand(-1, -1, ancestors.shape[2]))
            ancestors = torch.cat([seen, eye], 2)
        # Each node that is read has k children.
        parents = [torch.full_like(all_tokens[0], -1)]
        if read:
            parents.append(torch.cat(read, 1)[..., None].expand(-1, -1, k).flatten(1))
        # Number of nodes within each row's depth.
        within = torch.where(lengths > 0, k + (lengths - 1) * k * k, 0)
        nodes = Nodes(torch.cat(all_tokens, 1), torch.cat(parents, 1), within)
        return _likeliest_nodes(nodes, torch.cat(all_scores, 1), self.total_tokens - 1)

    def size(self, depth: int, vocab_size: int) -> TreeSize:
        k = min(self.top_k, vocab_size)
        nodes = min(k + (depth - 1) * k * k, self.total_tokens - 1)
        return TreeSize(nodes, (depth - 1) * k, depth)


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # Log-probabilities, at most 0; for a row without a distribution any tokens, with -inf.
    scores, tokens = logits.float().log_softmax(-1).topk(k)
    none = -float("inf")
    return scores.nan_to_num_(none, 0.0, none).clamp_max_(0), tokens


def _likeliest_nodes(nodes: Nodes, scores: Tensor, most: int) -> Nodes:
    """Return the `most` nodes of each row with the largest scores ``[B, N]``."""
    tokens, parents, within = nodes
    count = tokens.shape[1]
    most = min(most, count)
    index = torch.arange(count, device=tokens.device)
    scores = torch.where(index < within[:, None], scores, -float("inf"))
    # Stable: of equal scores the earlier node comes first, so a parent before its children.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    counts = within.clamp(max=most)
    # Back in the order of the levels; a row's surplus nodes go to the end.
    order = torch.where(index[:most] < counts[:, None], order, count).sort(dim=1).values
    valid = order < count
    chosen = order.clamp_max(count - 1)
    rank = torch.zeros_like(tokens[:, :1]).expand(-1, count + 1).clone()
    rank.scatter_(1, order, index[:most].expand_as(order))
    above = parents.gather(1, chosen)
    moved = torch.where(above >= 0, rank.gather(1, above.clamp_min(0)), -1)
    return Nodes(
        torch.where(valid, tokens.gather(1, chosen), 0), torch.where(valid, moved, -1), counts
    )


class StaticTree:
    """A tree of fixed shape, defined by its paths like Medusa's: ``[[0], [0, 0], [1]]`` has the
    likeliest token, the likeliest after it, and the second likeliest.

    Args:
        paths: 1 to 16383 paths, each with ranks >= 0 from the root on; prefixes must be included.

    Attributes:
        parents: index of each node's parent, -1 for the root; by depth, then by path.
        depths: depth of each node, >= 1.
        ranks: rank of each node among the tokens after its parent.

    Raises:
        TypeError, ValueError: `paths` are no lists of ranks, out of range, or without a prefix.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        entries = arguments.listed("paths", paths, "paths")
        if not 1 <= len(entries) <= NODE_MAX:
            count = len(entries) or "none"
            raise ValueError(f"paths: expected 1 to {NODE_MAX} paths, given {count}")
        index: dict[tuple[int, ...], int] = {(): -1}
        lists = [arguments.row_integers("paths", entry) for entry in entries]
        for path in sorted({tuple(ranks) for ranks in lists}, key=lambda p: (len(p), p)):
            if not path or min(path) < 0 or max(path) > arguments.SIZE_MAX:
                raise ValueError(f"paths: expected ranks >= 0, given {list(path)}")
            if path[:-1] not in index:
                raise ValueError(
                    f"paths: expected every beginning of a path, given {list(path)} without "
                    f"{list(path[:-1])}"
                )
            index[path] = len(index) - 1
        self.paths = list(index)[1:]
        self.parents = [index[path[:-1]] for path in self.paths]
        self.depths = [len(path) for path in self.paths]
        self.ranks = [path[-1] for path in self.paths]
        self._tables: dict[tuple[tuple[str, int], torch.device], Tensor] = {}

    def __repr__(self) -> str:
        return f"StaticTree({len(self.paths)} nodes, depth {self.depths[-1]})"

    def grow(
        self, logits: Tensor, states: Tensor, lengths: Tensor, depth: int, expand: Expand
    ) -> Nodes:
        batch, device = logits.shape[0], logits.device
        tokens: list[Tensor] = []  # [B] per node
        read: list[int] = []  # nodes, in that order
        inner = set(self.parents)
        likely = {-1: self._ranked(logits[:, None], [-1])[:, 0]}
        behind = {-1: states[:, 0]}
        for at in range(1, min(depth, self.depths[-1]) + 1):
            nodes = [i for i, node_depth in enumerate(self.depths) if node_depth == at]
            tokens += [likely[self.parents[i]][:, self.ranks[i]] for i in nodes]
            level = [i for i in nodes if i in inner]
            if at == depth or not level:
                break
            read += level
            ids = torch.stack([tokens[i] for i in level], 1)
            above = torch.stack([behind[self.parents[i]] for i in level], 1)
            seen = [
                [self.paths[i][: self.depths[other]] == self.paths[other] for other in read]
                for i in level
            ]
            ancestors = self._table(("ancestors", at), seen, device)[None]
            states, logits = expand(ids, above, at, ancestors)
            ranked = self._ranked(logits, level)
            for j, i in enumerate(level):
                likely[i], behind[i] = ranked[:, j], states[:, j]
        count = len(tokens)
        parents = self._table(("parents", count), self.parents[:count], device)
        depths = self._table(("depths", count), self.depths[:count], device)
        counts = (depths <= lengths[:, None]).sum(1)
        return Nodes(torch.stack(tokens, 1), parents.expand(batch, -1), counts)

    def size(self, depth: int, vocab_size: int) -> TreeSize:
        inner = set(self.parents)
        read = sum(1 for node, at in enumerate(self.depths) if at < depth and node in inner)
        return TreeSize(sum(at <= depth for at in self.depths), read, min(depth, self.depths[-1]))

    def _ranked(self, logits: Tensor, level: Sequence[int]) -> Tensor:
        most = max(rank for rank, up in zip(self.ranks, self.parents, strict=True) if up in level)
        if most >= logits.shape[-1]:
            raise ValueError(
                f"paths: expected ranks below the vocabulary's {logits.shape[-1]}, given {most}"
            )
        return logits.float().topk(most + 1).indices

    def _table(self, name: tuple[str, int], values: Any, device: torch.device) -> Tensor:
        # Copied to a device once: captured steps have no copies from the host.
        if (name, device) not in self._tables:
            self._tables[name, device] = torch.tensor(values).to(device)
        return self._tables[name, device]


def require_parents(name: str, parents: Sequence[int], most: int) -> None:
    """Refuse parents of a row's nodes that form no tree of at most `most` levels; `name` is the
    drafter's."""
    depths = {-1: 0}
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"{name}: expected the parent of node {node} in [-1, {node}), given {parent}"
            )
        depths[node] = depths[parent] + 1
    if (deepest := max(depths.values())) > most:
        raise ValueError(f"{name}: expected a tree of at most {most} levels, given {deepest}")


def require_nodes(
    name: str, tokens: Sequence[int], parents: Sequence[int], most: int, deterministic: bool
) -> None:
    """Refuse a tree that `require_parents` refuses, with parents of other than all `tokens`, or
    equal siblings in a `deterministic` tree."""
    if len(parents) != len(tokens):
        raise ValueError(
            f"{name}: expected as many parents as tokens, {len(tokens)}, given {len(parents)}"
        )
    require_parents(name, parents, most)
    if deterministic and len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ValueError(
            f"{name}: expected the children of a node to differ where there are no draft logits, "
            f"given parents {list(parents)} of tokens {list(tokens)}"
        )


def nodes_below(
    vocab_size: int, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return tokens and parents of the nodes with all ids from the root on below `vocab_size`."""
    index = {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token < vocab_size and parent in index:
            index[node] = len(index) - 1
    nodes = [node for node in index if node >= 0]
    return [tokens[node] for node in nodes], [index[parents[node]] for node in nodes]


# ---- several paths of a draft model --------------------------------------------------------------

# Paths are drawn independently or by beam search. At every depth a row has K nodes, of paths 0 to
# K-1. Paths with equal tokens so far continue below the node of the first path; the others' nodes
# stay as siblings, in the order of drawing, because the rule for drawn siblings counts them.


def draw_paths(
    inputs: DraftInput,
    forward: Callable[[InputBlock], LevelOutput],
    id_map: IdMap,
    vocab_size: int,
    draw: Callable[..., Any],
    paths: int,
    beam: float,
) -> DraftBlock:
    """Draft a tree of `paths` paths for each row, in one pass per depth. Rows of at most the
    temperature `beam` have a beam. Other arguments, and errors: as for `draw_chain`.

    Nodes are ordered by depth, then by path, in the cache as in the block.
    """
    tokens, most, read = inputs.tokens, inputs.most, inputs.counts
    device, lengths = tokens.device, inputs.lengths.on(tokens.device)
    known = inputs.lengths.host  # None: the host must not wait for draft tokens
    ids = min(vocab_size, inputs.vocab_size)
    entries = id_map.entries_below(ids)
    temperature = inputs.parameters.on(device)["temperature"]
    if isinstance(temperature, Tensor):
        certain = temperature <= beam
    else:  # 0 for all rows
        certain = torch.ones_like(lengths, dtype=torch.bool)
    # Whether any row may have a beam, and any row none.
    beams, samples = (known is None or bool(x.any()) for x in (certain, ~certain))
    samples = samples and inputs.wants_rows
    draws = PathDraws(inputs, paths, draw, device)
    best, rows = Beam(paths), None
    texts = tokens.new_empty(len(tokens), 1, 0)  # draft tokens up to each node of a pass
    nodes: list[Tensor] = []
    parents: list[Tensor] = []
    counts, first = (None, None) if read.all(tokens.shape[1]) else (read, read.less(1))
    block = InputBlock(tokens, 1, counts, first)
    for at in range(most):
        logits = forward(block).logits[..., :entries]
        if inputs.processors is not None:
            assert known is not None, "processors need the host to see the tokens"
            left = [max(n - at, 0) for n in known]
            logits = rooms.forced.processed(logits, inputs, left, texts, id_map, ids)
        depth = best.append(logits) if beams else None
        if samples:
            if rows is None:
                # A tree has exactly a row for each node and the root.
                rows = row_buffer(inputs.rows, 1 + paths * most, logits, exact=True)
            begin = 1 + paths * (at - 1) if at else 0
            rows.logits[:, begin : begin + logits.shape[1]] = logits
            drawn = draws.append(logits, at)
            if depth is not None:
                pairs = zip(depth, drawn, strict=True)
                drawn = Depth(*(torch.where(certain[:, None], a, b) for a, b in pairs))
            depth = drawn
        assert depth is not None
        nodes.append(id_map.to_above(depth.entries))
        above = depth.above + paths * (at - 1)
        parents.append(above if at else torch.full_like(above, -1))
        if inputs.processors is not None:
            leading = texts.gather(1, depth.above[..., None].expand(-1, -1, at))
            texts = torch.cat([leading, nodes[-1][..., None]], 2)
        counts = None
        if known is None:
            counts = RowCounts(None, torch.where(lengths > at + 1, paths, 0))
        elif min(known) <= at + 1:
            counts = RowCounts([paths if n > at + 1 else 0 for n in known])
        # (A token that could not be drawn is -1.)
        tree = torch.cat(parents, 1)
        block = InputBlock(nodes[-1].clamp_min(0), paths, counts, None, tree, depth=at + 1)
    drafts = DraftBlock(torch.cat(nodes, 1), lengths * paths, rows=rows, parents=tree)
    if rows is not None:
        if known is not None:
            draws.require(inputs, known, certain)
        assert rows.statistics is not None
        draws.fill(rows.statistics)
        drafts.drawn = (~certain)[:, None].expand(-1, 1 + paths * most) if beams else None
    return drafts


class Depth(NamedTuple):
    """The nodes of a depth."""

    entries: Tensor  # ``[B, K]`` int64, entries of the rows of logits
    above: Tensor  # ``[B, K]`` int64, index of each node's parent in the depth above


class Beam:
    """The `paths` likeliest continuations, by the product of probabilities at temperature 1."""

    def __init__(self, paths: int) -> None:
        self._paths = paths
        self._scores: Tensor | None = None  # [B, K]

    def append(self, logits: Tensor) -> Depth:
        """Append the next depth by the logits after the last depth, ``[B, K, V]``; ``[B, 1, V]``
        after the text."""
        none = -float("inf")
        gains, entries = logits.float().log_softmax(-1).topk(self._paths)
        # A row without a distribution has any tokens, at -inf.
        scores = gains.nan_to_num_(none, 0.0, none)
        if self._scores is not None:
            scores = scores + self._scores[..., None]
        self._scores, best = scores.flatten(1).topk(self._paths)
        return Depth(entries.flatten(1).gather(1, best), best // self._paths)


class PathDraws:
    """The draws of all K paths of a draft, with different keys, joined by prefixes.

    Attributes:
        first: ``[B, K]`` int64, for each path the first path with the same tokens so far.
    """

    def __init__(
        self, inputs: DraftInput, paths: int, draw: Callable[..., Any], device: torch.device
    ) -> None:
        def by_path(values: Any) -> Any:
            return values.repeat_interleave(paths) if isinstance(values, Tensor) else values

        batch, self._paths, self._draw, self._level = len(inputs.tokens), paths, draw, inputs.level
        self._parameters = [by_path(x) for x in inputs.parameters.on(device).values()]
        self._positions, self._rounds = (
            by_path(x.to(device)) for x in (inputs.positions, inputs.rounds)
        )
        self._nodes = torch.arange(paths, device=device).repeat(batch)
        self._tokens = torch.empty(batch * paths, inputs.most, dtype=torch.int64, device=device)
        self._status = torch.zeros_like(self._tokens, dtype=torch.int32)
        self._known = self._tokens.new_zeros(batch * paths, inputs.most, 2)
        self._same = torch.ones(batch, paths, paths, dtype=torch.bool, device=device)
        self.first = torch.zeros(batch, paths, dtype=torch.int64, device=device)

    def append(self, logits: Tensor, at: int) -> Depth:
        """Append the nodes at depth `at`; arguments as for `next`."""
        depth = Depth(self.next(logits, self.first, at), self.first)
        self._same &= depth.entries[:, :, None] == depth.entries[:, None, :]
        self.first = self._same.to(torch.uint8).argmax(-1)
        return depth

    def next(self, logits: Tensor, first: Tensor, at: int) -> Tensor:
        """Draw the token at depth `at` of each path, ``[B, K]``.

        Args:
            logits: ``[B, K, V]`` after the tokens of each path so far; ``[B, 1, V]`` at depth 0.
            first: ``[B, K]`` int64, path of the row of logits to draw from.
        """
        batch = torch.arange(len(logits), device=logits.device)
        behind = logits[batch[:, None], first].flatten(0, 1)[:, None]
        where = self._positions, self._rounds, self._level, at
        tables = self._tokens, self._status, None, self._known
        drawn: Tensor = self._draw(behind, self._parameters, *where, *tables, nodes=self._nodes)
        return drawn.view(-1, self._paths)

    def fill(self, statistics: Tensor) -> None:
        """Write the statistics ``[B, N + 1, 2]`` of the rows after the root and the nodes."""
        by_depth = self._known.unflatten(0, (-1, self._paths)).transpose(1, 2)
        statistics[:, 0] = by_depth[:, 0, 0]
        read = by_depth[:, 1:].flatten(1, 2)
        statistics[:, 1 : 1 + read.shape[1]] = read

    def require(self, inputs: DraftInput, lengths: Sequence[int], certain: Tensor) -> None:
        """Refuse a row of logits without a distribution in an active row."""
        if not bool((self._status & ERROR_BITS).any()):
            return
        status = self._status.unflatten(0, (-1, self._paths)).tolist()
        for b, beam in enumerate(certain.tolist()):
            for at in range(0 if beam else lengths[b]):
                bits = next((path[at] for path in status[b] if path[at] & ERROR_BITS), 0)
                if bits:
                    position = int(inputs.positions[b]) + at
                    raise RequestError(inputs.requests[b], inputs.level, position, bits)
