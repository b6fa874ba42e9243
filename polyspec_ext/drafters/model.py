"""A small language model as drafter: the ordinary case."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch

from .. import arguments
from ..errors import ERROR_BITS, RequestError
from ..levels import IdMap
from ..levels.adapter import batched
from ..levels.base import (
    BatchedLevel,
    Continuing,
    DeviceLengths,
    InputBlock,
    Level,
    LevelOutput,
    PromptBatch,
    id_map_of,
    input_vocab_size,
)
from ..ops import unchecked
from ..sampling import LogitsProcessors
from ..tensors import RowCounts
from .base import DraftBlock, DrafterCapabilities, DraftInput, RowBuffer


class DraftModel:
    """Draws tokens one after another from a level's processed distribution, for all rows of a
    batch.

    Args:
        level: the model; its cache belongs to this drafter from now on.
        vocab_size: ids from here on are cut off the logits before anything is drawn (a padded
            vocabulary, or one larger than the level's above). None: the level's own.
        draw: `ops.unchecked.draw`, or what stands in for it.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    def __init__(
        self,
        level: Level | BatchedLevel,
        vocab_size: int | None = None,
        draw: Callable[..., Any] = unchecked.draw,
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
            id_map=can.id_map,
        )

    @property
    def revision(self) -> int:
        """See `Continuing`."""
        return cast(Continuing, self._level).revision

    @property
    def one_at_a_time(self) -> str:
        """Why the level takes no batches."""
        return str(getattr(self._level, "one_at_a_time", f"{self.name} serves one at a time"))

    def prefill(self, prompts: PromptBatch) -> object:
        """See `BatchedDrafter.prefill`."""
        return self._level.prefill(prompts)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """See `BatchedDrafter.read`."""
        self._level.read(tokens, counts)

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """See `BatchedDrafter.rollback`."""
        return self._level.rollback(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """See `BatchedDrafter.select`."""
        self._level.select(rows)

    def reserve_span(self, tokens: int) -> Hashable | None:
        """See `DeviceLengths.reserve_span`."""
        return cast(DeviceLengths, self._level).reserve_span(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """See `DeviceLengths.note_lengths`."""
        cast(DeviceLengths, self._level).note_lengths(lengths)

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`.

        Raises:
            RequestError: a row of logits has no distribution, and the host may read the tokens.
        """
        block = draw_chain(inputs, self._level.forward, self._ids, self.vocab_size, self._draw)
        self.num_forward_passes += block.tokens.shape[1]
        return block


def draw_chain(
    inputs: DraftInput,
    forward: Callable[[InputBlock], LevelOutput],
    id_map: IdMap,
    vocab_size: int,
    draw: Callable[..., Any],
) -> DraftBlock:
    """Draws one token after another, of all rows, in as many passes as the block has tokens.

    Args:
        forward: a pass behind what was read: first the tokens of `inputs`, then those just drawn.
        id_map: of its logits.
        vocab_size: ids from here on are cut off them.
        draw: see `DraftModel`.

    Raises:
        RequestError: a row of logits has no distribution, and the host may read the tokens.
    """
    tokens, read, most = inputs.tokens, inputs.counts, inputs.most
    device, even = tokens.device, read.all(tokens.shape[1])
    parameters = inputs.parameters.on(device).values()
    rounds, positions = inputs.rounds, inputs.positions
    if rounds.device != device:
        rounds, positions = rounds.to(device), positions.to(device)
    # Tokens that each row has yet to draw. Where the host must not wait for the device, every
    # row with a part draws all of them.
    left = None if inputs.eos is None else list(inputs.lengths.host or ())
    counts, first = (None, None) if even else (read, read.less(1))
    entries, every = min(vocab_size, inputs.vocab_size), id_map.drawn is None
    if not every:
        entries = id_map.entries_below(entries)
    drafted = tokens.new_empty((tokens.shape[0], most))
    status = torch.empty_like(drafted, dtype=torch.int32)
    rows: RowBuffer | None = None
    kept = statistics = None
    for i in range(most):
        logits = forward(InputBlock(tokens, 1, counts, first)).logits
        if logits.shape[2] > entries:
            logits = logits[..., :entries]
        if inputs.processors is not None:
            assert left is not None, "processors need the host to see the tokens"
            # Processors change logits by their ids.
            whole = logits if every else id_map.spread(logits, min(vocab_size, inputs.vocab_size))
            text = id_map.to_above(drafted[:, :i])
            whole = _processed(whole, inputs, inputs.processors, left, text)
            logits = whole if every else id_map.gather(whole, entries)
        if rows is None and inputs.wants_rows:
            rows = _room(inputs.rows, most, logits)
            kept, statistics = rows
        # (The level may write its logits again with the next pass.)
        tokens = draw(
            logits,
            parameters,
            positions,
            rounds,
            inputs.level,
            i,
            drafted,
            status,
            kept,
            statistics,
        )
        if not every:
            tokens = id_map.to_above(tokens)
        if left is None:
            if i == 0:
                counts, first = read.less(0, 1), read.less(0, 0)
            # One that could not be drawn is -1, and the host has not read it yet.
            tokens = tokens.clamp_min(0)
            continue
        assert inputs.eos is not None
        for b, (token,) in enumerate(tokens.tolist()):
            if token < 0:
                if left[b]:
                    _require_drawn(status, inputs, left, i)
                tokens = tokens.clamp_min(0)  # a row without a part may have drawn none
            if left[b]:
                left[b] = 0 if token in inputs.eos[b] else left[b] - 1
        if not any(left):
            break
        counts = None if all(left) else RowCounts(left).less(0, 1)
        first = None
    if i + 1 < most:  # every text ends before
        drafted = drafted[:, : i + 1]
    return DraftBlock(
        drafted if every else id_map.to_above(drafted),
        status=status if left is None else None,
        rows=rows,
    )


def _require_drawn(
    status: torch.Tensor, inputs: DraftInput, left: Sequence[int], place: int
) -> None:
    """Every row that draws token `place` has drawn it.

    Args:
        status: ``[B, W]``.

    Raises:
        RequestError: one has not.
    """
    for b, bits in enumerate(status[:, place].tolist()):
        if left[b] and bits & ERROR_BITS:
            at = int(inputs.positions[b]) + place
            raise RequestError(inputs.requests[b], inputs.level, at, bits)


def _processed(
    logits: torch.Tensor,
    inputs: DraftInput,
    processors: LogitsProcessors,
    left: Sequence[int],
    drafted: torch.Tensor,
) -> torch.Tensor:
    """Logits as the processors give them, of the rows that draw another token."""
    assert inputs.text is not None
    out = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
    for b, more in enumerate(left):
        if more:
            text = inputs.text(b).to(logits.device)
            prefix = torch.cat([text, drafted[b]])
            out[b] = processors.apply(logits[b], prefix, inputs.requests[b])
    return out


def _room(old: RowBuffer | None, most: int, logits: torch.Tensor) -> RowBuffer:
    """Room for `most` rows per request like those of `logits`, ``[B, 1, Vd]``."""
    batch, _, vocab = logits.shape
    if old is not None and old.statistics is not None:
        shape = old.logits.shape
        fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab
        if fits and old.logits.dtype == logits.dtype and old.logits.device == logits.device:
            return old
    # Zeros: what no row fills is handed to the operator as well, and must be harmless.
    statistics = torch.zeros(batch, most, 2, dtype=torch.int64, device=logits.device)
    return RowBuffer(logits.new_zeros(batch, most, vocab), statistics)
