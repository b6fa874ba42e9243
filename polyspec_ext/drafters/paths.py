"""Several paths of a draft model, drawn independently or by beam search, and joined to a tree.

At every depth a row has K nodes, of paths 0 to K-1. Paths with equal tokens so far continue below
the node of the first path; the others' nodes stay as siblings, in the order of drawing, because the
rule for drawn siblings counts them. All of it is tensor code without host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ERROR_BITS, RequestError
from ..levels.base import IdMap, InputBlock, LevelOutput
from ..tensors import RowCounts
from .base import DraftBlock, DraftInput, RowBuffer, processed


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
    some, others = (known is None or bool(x.any()) for x in (certain, ~certain))
    others = others and inputs.wants_rows
    draws = PathDraws(inputs, paths, draw, device)
    joined, best, rows = Joined(len(tokens), paths, device), Beam(paths), None
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
            whole = processed(id_map.spread(logits, ids), inputs, left, texts)
            logits = id_map.gather(whole, entries)
        depth = best.append(logits) if some else None
        if others:
            if rows is None:
                rows = _exact_rows(inputs.rows, 1 + paths * most, logits)
            begin = 1 + paths * (at - 1) if at else 0
            rows.logits[:, begin : begin + logits.shape[1]] = logits
            drawn = joined.append(draws.next(logits, joined.first, at))
            depth = drawn if depth is None else either(certain, depth, drawn)
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
    made = DraftBlock(torch.cat(nodes, 1), lengths * paths, rows=rows, parents=tree)
    if rows is not None:
        if known is not None:
            draws.require(inputs, known, certain)
        assert rows.statistics is not None
        draws.fill(rows.statistics)
        made.drawn = (~certain)[:, None].expand(-1, 1 + paths * most) if some else None
    return made


class Depth(NamedTuple):
    """The nodes of a depth."""

    entries: Tensor  # ``[B, K]`` int64, entries of the rows of logits
    above: Tensor  # ``[B, K]`` int64, index of each node's parent in the depth above


class Joined:
    """Paths of i.i.d. tokens, joined by common prefixes: K paths in each of B rows.

    Attributes:
        first: ``[B, K]`` int64, for each path the first path with the same tokens so far.
    """

    def __init__(self, batch: int, paths: int, device: torch.device) -> None:
        self._same = torch.ones(batch, paths, paths, dtype=torch.bool, device=device)
        self.first = torch.zeros(batch, paths, dtype=torch.int64, device=device)

    def append(self, entries: Tensor) -> Depth:
        """Append the tokens ``[B, K]`` of the paths, each drawn from the row of its `first`."""
        depth = Depth(entries, self.first)
        self._same &= entries[:, :, None] == entries[:, None, :]
        self.first = self._same.to(torch.uint8).argmax(-1)
        return depth


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


def either(certain: Tensor, beam: Depth, drawn: Depth) -> Depth:
    """Return the nodes of the beam in rows with `certain`, ``[B]`` bool, and the drawn nodes in
    others."""
    return Depth(*(torch.where(certain[:, None], a, b) for a, b in zip(beam, drawn, strict=True)))


class PathDraws:
    """The draws of all K paths of a draft, with different keys."""

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

    def next(self, logits: Tensor, first: Tensor, at: int) -> Tensor:
        """Draw the token at depth `at` of each path, ``[B, K]``.

        Args:
            logits: ``[B, K, V]`` after the tokens of each path so far; ``[B, 1, V]`` at depth 0.
            first: ``[B, K]`` int64, path of the row of logits to draw from (`Joined`).
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


def _exact_rows(old: RowBuffer | None, count: int, logits: Tensor) -> RowBuffer:
    # A tree has exactly a row for each node and the root.
    shape, kind = (len(logits), count, logits.shape[2]), (logits.dtype, logits.device)
    if old is not None and old.statistics is not None:
        kept = old.logits
        if kept.shape == shape and (kept.dtype, kept.device) == kind:
            return old
    statistics = torch.zeros(*shape[:2], 2, dtype=torch.int64, device=logits.device)
    return RowBuffer(logits.new_zeros(shape), statistics)
