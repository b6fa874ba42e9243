"""A small language model as drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from .. import arguments, rooms
from ..errors import ERROR_BITS, RequestError
from ..levels.base import (
    BatchedLevel,
    InputBlock,
    Level,
    LevelOutput,
    batched,
    id_map_of,
    input_vocab_size,
)
from ..ops import verification
from ..tensors import IdMap, RowCounts
from .base import DraftBlock, DrafterCapabilities, DraftInput, RowBuffer, TreeSize

DEEPEST = 32  # maximum tokens of each of several paths; rule "block" verifies no more
BEAM = 0.5  # temperature up to which a beam's accepted paths are longer (docs/drafters/paths.md)


def forwarded(method: str) -> Callable[..., Any]:
    """Return a method that calls the method of this name of the attribute `_level`."""

    def call(self: Any, *values: Any) -> Any:
        return getattr(self._level, method)(*values)

    return call


class DraftModel:
    """A drafter that draws tokens in turn from a level's processed distribution, for all rows of a
    batch; with `paths` a tree of several continuations, which the level above verifies at once.

    Args:
        level: the model; its cache is for the exclusive use of the drafter.
        vocab_size: drawn ids are below it: logits are truncated before draws (for a vocabulary
            that is padded, or larger than that of the level above). None: the level's.
        draw: `ops.verification.draw`, or a replacement.
        paths: number of continuations, each of the window's length and at most 32 tokens, in one
            pass per token. They are drawn independently, and joined to a tree by common prefixes.
            1: a chain.
        beam: rows of at most this temperature have the likeliest continuations instead, proposed
            deterministically (EAGLE-2's rule): more of them are accepted at low temperatures.

    Raises:
        TypeError, ValueError: an argument is of another type or out of range; several paths with a
            level that reads no trees.
    """

    def __init__(
        self,
        level: Level | BatchedLevel,
        vocab_size: int | None = None,
        draw: Callable[..., Any] = verification.draw,
        *,
        paths: int = 1,
        beam: float = BEAM,
    ) -> None:
        if isinstance(level, type) or not isinstance(level, Level | BatchedLevel):
            raise TypeError(f"level: expected a level, given {arguments.shown(level)}")
        arguments.function("draw", draw)
        self.level, self._level = level, batched(level)
        self.name, self.device = self._level.name, self._level.device
        self.max_length = self._level.max_length
        self.vocab_size = self.input_vocab_size = input_vocab_size(self._level)
        self._ids = id_map_of(self._level)
        if vocab_size is not None:
            vocab_size = arguments.integer("vocab_size", vocab_size, arguments.SIZE_MAX, 1)
            self.vocab_size = min(vocab_size, self.vocab_size)
        self.paths = arguments.integer("paths", paths, arguments.NODE_MAX // DEEPEST, 1)
        self.beam = arguments.real("beam", beam, arguments.TEMPERATURE_MAX)
        if self.paths > 1:
            if not self._level.capabilities.trees:
                reason = getattr(self._level, "no_trees", f"{type(level).__name__} does not")
                raise ValueError(
                    f"{self.name}: expected a level that reads trees for paths={self.paths}, given "
                    f"one that does not: {reason}"
                )
            entries = self._ids.entries_below(self.vocab_size)
            if self.paths > entries:
                raise ValueError(f"paths: expected at most the {entries} ids drawn, given {paths}")
            self.name = f"{self.name}, {self.paths} paths"
        alone = f"{self.name} serves one at a time"
        self.one_at_a_time = str(getattr(self._level, "one_at_a_time", alone))
        self.num_forward_passes = 0
        self._draw = draw

    @property
    def capabilities(self) -> DrafterCapabilities:
        can = self._level.capabilities
        return DrafterCapabilities(
            can.batches,
            can.device_lengths,
            can.reads_apart,
            keeps_lengths=can.keeps_lengths,
            continues=can.continues,
            admits=can.admits,
            reads_together=can.reads_together,
            saves_rows=can.saves_rows,
            id_map=can.id_map,
            trees=self.paths > 1,
            keeps_paths=self.paths > 1,
            tree_size=self._tree_size if self.paths > 1 else None,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        depth = min(depth, DEEPEST)
        return TreeSize(self.paths * depth, self.paths * (depth - 1), depth)

    prefill = forwarded("prefill")
    read = forwarded("read")
    rollback = forwarded("rollback")
    select = forwarded("select")
    open = forwarded("open")
    extend = forwarded("extend")
    extend_together = forwarded("extend_together")
    admit = forwarded("admit")
    save = forwarded("save")
    restore = forwarded("restore")
    reserve_span = forwarded("reserve_span")
    note_lengths = forwarded("note_lengths")

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        # The level has not read the last node of a path.
        read = lengths.on(path.device) - begin.on(path.device)
        is_read = torch.arange(path.shape[1], device=path.device) < read[:, None]
        return self._level.keep_path(begin, path.where(is_read, -1), lengths)

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft as `BatchedDrafter.draft`.

        Raises:
            RequestError: a row of logits has no distribution, if the host may read the tokens.
        """
        forward = self._level.forward
        if inputs.passes is not None:
            forward = partial(inputs.passes.forward, self._level)
        options = forward, self._ids, self.vocab_size, self._draw
        if self.paths == 1:
            block = draw_chain(inputs, *options)
            self.num_forward_passes += block.tokens.shape[1]
            return block
        if inputs.most > DEEPEST:
            inputs = replace(inputs, lengths=inputs.lengths.less(0, DEEPEST), most=DEEPEST)
        self.num_forward_passes += inputs.most
        return rooms.draft_trees.draw_paths(inputs, *options, self.paths, self.beam)


def draw_chain(
    inputs: DraftInput,
    forward: Callable[[InputBlock], LevelOutput],
    id_map: IdMap,
    vocab_size: int,
    draw: Callable[..., Any],
) -> DraftBlock:
    """Draw tokens in turn for all rows, in one pass per token of the block. Raises as
    `DraftModel.draft`.

    Args:
        forward: a pass that reads the tokens of `inputs` first, then the latest drawn tokens.
        id_map: ids of the logits' entries.
        vocab_size: drawn ids are below it; logits are truncated.
    """
    tokens, read, most = inputs.tokens, inputs.counts, inputs.most
    device, every = tokens.device, id_map.drawn is None
    ids = min(vocab_size, inputs.vocab_size)
    parameters = inputs.parameters.by_device[device].values()
    positions, rounds = inputs.positions.to(device), inputs.rounds.to(device)
    # Number of tokens that each row has yet to draw. If the host must not wait for the device,
    # every active row draws all.
    left = None if inputs.eos is None else list(cast(Sequence[int], inputs.lengths.host))
    counts, first, later = _first_pass(read, tokens.shape[1])
    entries = ids if every else id_map.entries_below(ids)
    wants_rows = inputs.wants_rows
    drafted = tokens.new_empty((tokens.shape[0], most))
    status = torch.empty_like(drafted, dtype=torch.int32)
    rows: RowBuffer | None = None
    buffers: Any = (None, None)
    # A token that could not be drawn is -1, and a pass may read it before the host.
    readable = (None, True) if left is None else ()
    for i in range(most):
        logits = forward(InputBlock(tokens, 1, counts, first)).logits[..., :entries]
        if inputs.processors is not None:
            assert left is not None, "processors need the host to see the tokens"
            texts = id_map.to_above(drafted[:, None, :i])
            logits = rooms.forced.processed(logits, inputs, left, texts, id_map, ids)
        if wants_rows:
            rows = buffers = row_buffer(inputs.rows, most, logits)
            wants_rows = False
        # (The level may overwrite its logits in the next pass.)
        tokens = draw(
            logits, parameters, positions, rounds, inputs.level, i, drafted, status, *buffers,
            *readable,
        )  # fmt: skip
        if not every:
            tokens = id_map.to_above(tokens)
        first = None
        if left is None:
            counts = later
            continue
        assert inputs.eos is not None
        for b, (token,) in enumerate(tokens.tolist()):
            if token < 0:
                _require_drawn(inputs, b, i, left[b], int(status[b, i]))
                tokens = tokens.clamp_min(0)  # in inactive rows
            left[b] = 0 if token in inputs.eos[b] else max(left[b] - 1, 0)
        if not any(left):
            drafted = drafted[:, : i + 1]
            break
        counts = None if all(left) else RowCounts(left).less(0, 1)
    return DraftBlock(
        drafted if every else id_map.to_above(drafted),
        status=status if left is None else None,
        rows=rows,
    )


def _first_pass(read: RowCounts, width: int) -> Sequence[RowCounts | None]:
    # Counts, and the index of the last token of each row, None: as in all rows; and the counts of
    # later passes, unless the host knows that all rows read `width` tokens.
    if read.host is not None and min(read.host) == width:
        return None, None, None
    return (read, None, read) if width == 1 else (read, read.less(1), read.less(0, 1))


def _require_drawn(inputs: DraftInput, row: int, at: int, left: int, status: int) -> None:
    if left and status & ERROR_BITS:
        position = int(inputs.positions[row]) + at
        raise RequestError(inputs.requests[row], inputs.level, position, status)


def row_buffer(
    old: RowBuffer | None, most: int, logits: torch.Tensor, exact: bool = False
) -> RowBuffer:
    """Return `old`, if it has at least `most` rows per request (`exact`: as many) of the shape,
    dtype and device of `logits`, or else a new buffer."""
    batch, _, vocab = logits.shape
    if old is not None and old.statistics is not None:
        shape, kind = old.logits.shape, (old.logits.dtype, old.logits.device)
        fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab
        fits = fits and (shape[1] == most or not exact)
        if fits and kind == (logits.dtype, logits.device):
            return old
    # Zeros: the operator also reads rows that are never filled.
    statistics = torch.zeros(batch, most, 2, dtype=torch.int64, device=logits.device)
    return RowBuffer(logits.new_zeros(batch, most, vocab), statistics)
