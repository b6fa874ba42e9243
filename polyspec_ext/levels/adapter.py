"""Levels of users' own as the engine calls them, and what they return checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .. import returned
from ..tensors import RowCounts
from .base import (
    BatchedLevel,
    Hidden,
    InputBlock,
    Level,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    device_of,
    id_map_of,
)


def batched(level: Any, name: str | None = None) -> BatchedLevel:
    """A level as the engine calls it.

    Args:
        level: a `Level` or a `BatchedLevel`.
        name: for messages; the level's own otherwise.
    """
    if not isinstance(level, BatchedLevel):
        return LevelAdapter(level, name)
    return level if level.capabilities.checked else CheckedLevel(level, name)


class _Wrapper:
    """What both have of the level that they wrap.

    Attributes:
        level: as the user gave it.
    """

    _lacks = ""

    def __init__(self, level: Any, name: str | None = None) -> None:
        self.level = level
        self.name = name or str(getattr(level, "name", type(level).__name__))
        self.max_length: int | None = getattr(level, "max_length", None)
        self.device = device_of(level)
        self.vocab_size = int(level.vocab_size)
        self._width = 0  # of rows of logits

    @property
    def one_at_a_time(self) -> str:
        """Why the level takes no batches."""
        lacks = self._lacks.format("batches")
        reason = f"{type(self.level).__name__} has {lacks} and serves one at a time"
        return getattr(self.level, "one_at_a_time", None) or reason

    @property
    def no_trees(self) -> str:
        """Why the level reads no trees."""
        reason = f"{type(self.level).__name__} has {self._lacks.format('trees')}"
        return getattr(self.level, "no_trees", None) or reason

    def select(self, rows: Sequence[int]) -> None:
        returned.call(self.name, self.level, "select", rows)

    def _kept(self, kept: Any, asked: RowCounts) -> Sequence[int]:
        if kept is None or kept is asked or asked.host is None:
            return asked
        return returned.require_kept(self.name, kept, asked.host)


class LevelAdapter(_Wrapper):
    """A user's `Level`, of four methods, as a `BatchedLevel`.

    Args:
        level: of one sequence, or of batches.
        name: for messages.

    Raises:
        TypeError, ValueError: the level returned something that its contract does not say; names
            the level.
    """

    _lacks = "no `supports_{}`"

    def __init__(self, level: Level, name: str | None = None) -> None:
        super().__init__(level, name)
        batches = bool(getattr(level, "supports_batches", False))
        id_map = getattr(level, "id_map", None)
        self.capabilities = LevelCapabilities(batches=batches, checked=True, id_map=id_map)
        self._width = id_map_of(self).entries_below(self.vocab_size)

    def prefill(self, prompts: PromptBatch) -> None:
        reserve = getattr(self.level, "reserve", None)
        if reserve is not None:
            reserve(prompts.capacity)
        counts = () if prompts.counts is None else (prompts.counts,)
        returned.call(self.name, self.level, "prefill", prompts.tokens, *counts)

    def forward(self, block: InputBlock) -> LevelOutput:
        if block.counts is None and block.first is None:
            logits = self.level.forward(block.tokens, block.keep)
        else:
            given = (None if own is None else list(own) for own in (block.counts, block.first))
            logits = self.level.forward(block.tokens, block.keep, *given)
        batch, keep = block.tokens.shape[0], block.keep
        returned.require_logits(self.name, logits, batch, keep, self._width, self.device)
        return LevelOutput(logits)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self.forward(reading(tokens, counts))

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        known = lengths if lengths.host is None else lengths.host
        return self._kept(self.level.rollback(list(known)), lengths)

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")


class CheckedLevel(_Wrapper):
    """A user's `BatchedLevel`, with what it returns checked.

    Args, Raises: as of `LevelAdapter`.
    """

    _lacks = "capabilities without `{}`"
    level: Any

    def __init__(self, level: BatchedLevel, name: str | None = None) -> None:
        super().__init__(level, name)
        self._width = id_map_of(level).entries_below(self.vocab_size)

    @property
    def capabilities(self) -> LevelCapabilities:
        own: LevelCapabilities = self.level.capabilities
        return own

    @property
    def revision(self) -> int:
        """See `Continuing`."""
        revision: int = self.level.revision
        return revision

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        return self._states(self.level.prefill(prompts), prompts)

    def admit(self, slots: Sequence[int], prompts: PromptBatch) -> Hidden | None:
        return self._states(self.level.admit(slots, prompts), prompts)

    def _states(self, hidden: Hidden | None, prompts: PromptBatch) -> Hidden | None:
        if prompts.hidden_layers:
            shape = prompts.tokens.shape
            returned.require_hidden(self.name, hidden, prompts.hidden_layers, shape)
        return hidden

    def forward(self, block: InputBlock) -> LevelOutput:
        out = self.level.forward(block)
        if type(out) is not LevelOutput:
            returned.require_output(self.name, out)
            out = LevelOutput(*out)
        if block.hidden_layers:
            shape = block.tokens.shape
            returned.require_hidden(self.name, out.hidden, block.hidden_layers, shape)
        batch, keep = block.tokens.shape[0], block.keep
        returned.require_logits(self.name, out.logits, batch, keep, self._width, self.device)
        return out

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        returned.call(self.name, self.level, "read", tokens, counts)

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.rollback(lengths), lengths)

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.keep_path(begin, path, lengths), lengths)

    def reserve_span(self, tokens: int) -> Hashable | None:
        span: Hashable | None = self.level.reserve_span(tokens)
        return span

    def note_lengths(self, lengths: Sequence[int]) -> None:
        self.level.note_lengths(lengths)


def reading(tokens: torch.Tensor, counts: Sequence[int]) -> InputBlock:
    """A pass that appends ``counts[b]`` of `tokens` to row b, for nobody wants its logits."""
    given = RowCounts.of(counts)
    if given.all(tokens.shape[1]):
        return InputBlock(tokens, 1)
    return InputBlock(tokens, 1, given, given.less(1))
