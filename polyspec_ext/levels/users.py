"""Users' levels: a `Level` as a `BatchedLevel`, with outputs checked in every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..arguments import LOGITS_DTYPES, wrong_kind
from ..tensors import RowCounts
from .base import (
    BatchedLevel,
    Hidden,
    InputBlock,
    Ints,
    Layers,
    Level,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    device_of,
    id_map_of,
    reading,
)


def checked_level(level: Any, name: str | None = None) -> BatchedLevel:
    """Return a user's level with the engine's interface (`levels.base.batched`)."""
    if not isinstance(level, BatchedLevel):
        level = _Adapted(level, name)
    return level if level.capabilities.checked else _Checked(level, name)


def forwarded(method: str, returns: bool = True) -> Callable[..., Any]:
    """Return a method that calls the level's `method`; without `returns`, it must return None."""

    def call(self: Any, *values: Any) -> Any:
        result = getattr(self.level, method)(*values)
        # A result, such as a coroutine, False or other lengths than asked for, would be ignored.
        if not returns and result is not None:
            wrong_kind(self.name, f"{method} to return None", result)
        return result

    return call


class _Users:
    """A user's level, with a reason for each capability that it lacks."""

    select = forwarded("select", returns=False)

    def __init__(self, level: Any, name: str | None, lacks: str) -> None:
        kind = type(level).__name__
        self.level, self.name = level, name or str(getattr(level, "name", kind))
        self.vocab_size, self.device = int(level.vocab_size), device_of(level)
        self.max_length: int | None = getattr(level, "max_length", None)
        alone = f"{kind} has {lacks.format('batches')} and serves one at a time"
        self.one_at_a_time: str = getattr(level, "one_at_a_time", None) or alone
        trees = f"{kind} has {lacks.format('trees')}"
        self.no_trees: str = getattr(level, "no_trees", None) or trees


class _Adapted(_Users):
    """A user's `Level`, with four methods, as a `BatchedLevel`."""

    _begin = forwarded("prefill", returns=False)

    def __init__(self, level: Level, name: str | None) -> None:
        batches = bool(getattr(level, "supports_batches", False))
        self.capabilities = LevelCapabilities(batches, id_map=getattr(level, "id_map", None))
        super().__init__(level, name, "no `supports_{}`")

    def prefill(self, prompts: PromptBatch) -> None:
        reserve = getattr(self.level, "reserve", None)
        if reserve is not None:
            reserve(prompts.capacity)
        counts = () if prompts.counts is None else (prompts.counts,)
        self._begin(prompts.tokens, *counts)

    def forward(self, block: InputBlock) -> LevelOutput:
        by_row: tuple[Any, ...] = ()
        if block.counts is not None or block.first is not None:
            by_row = tuple(None if x is None else list(x) for x in (block.counts, block.first))
        return LevelOutput(self.level.forward(block.tokens, block.keep, *by_row))

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self.forward(reading(tokens, counts))

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        kept: Sequence[int] = self.level.rollback(list(lengths))
        return kept

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")


class _Checked(_Users):
    """A user's `BatchedLevel`, with checked outputs."""

    open = forwarded("open")
    save = forwarded("save")
    reserve_span = forwarded("reserve_span")
    note_lengths = forwarded("note_lengths")
    admit = forwarded("admit", returns=False)
    restore = forwarded("restore", returns=False)
    read = forwarded("read", returns=False)

    def __init__(self, level: BatchedLevel, name: str | None) -> None:
        super().__init__(level, name, "capabilities without `{}`")
        self._width = id_map_of(self).entries_below(self.vocab_size)  # of rows of logits

    @property
    def capabilities(self) -> LevelCapabilities:
        stated: LevelCapabilities = self.level.capabilities
        return stated

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        return self._states(self.level.prefill(prompts), prompts.hidden_layers, prompts.tokens)

    def extend(self, sequence: Any, tokens: torch.Tensor, layers: Layers) -> Hidden | None:
        return self._states(self.level.extend(sequence, tokens, layers), layers, tokens)

    def extend_together(
        self, sequences: Sequence[Any], tokens: torch.Tensor, counts: Ints, layers: Layers
    ) -> Hidden | None:
        hidden = self.level.extend_together(sequences, tokens, counts, layers)
        return self._states(hidden, layers, tokens)

    def _states(self, hidden: Any, layers: Layers, tokens: torch.Tensor) -> Hidden | None:
        """Require hidden states ``[B, T, H]`` by layer of a pass over `tokens`, ``[B, T]``."""
        if not layers:
            return None  # an empty dict would count as states
        if not isinstance(hidden, Mapping):
            wrong_kind(self.name, "hidden states by layer", hidden)
        batch, width = tokens.shape
        for layer in layers:
            states = hidden.get(layer)
            if not isinstance(states, torch.Tensor) or not states.is_floating_point():
                wrong_kind(self.name, f"hidden states of layer {layer}", states)
            if states.dim() != 3 or states.shape[:2] != tokens.shape:
                raise ValueError(
                    f"{self.name}: expected hidden states of shape [B, T, H] = [{batch}, {width}, "
                    f"H] of layer {layer}, given {list(states.shape)}"
                )
        return hidden

    def forward(self, block: InputBlock) -> LevelOutput:
        out = self.level.forward(block)
        if type(out) is not LevelOutput:
            if not isinstance(out, tuple) or not 1 <= len(out) <= 3:
                wrong_kind(self.name, "forward to return a LevelOutput", out)
            out = LevelOutput(*out)
        shape = len(block.tokens), block.keep, self._width
        _require_logits(self.name, out.logits, shape, self.device)
        hidden = self._states(out.hidden, block.hidden_layers, block.tokens)
        return out if out.hidden is hidden else out._replace(hidden=hidden)

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.rollback(lengths), lengths)

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.keep_path(begin, path, lengths), lengths)

    def _kept(self, kept: Any, lengths: RowCounts) -> Sequence[int]:
        """Require the cached lengths after `rollback`: at most the lengths asked."""
        asked = lengths.host
        if kept is None or kept is lengths or asked is None:
            return lengths
        left = kept.tolist() if isinstance(kept, torch.Tensor) else kept
        if not (isinstance(left, Sequence) and all(type(length) is int for length in left)):
            wrong_kind(self.name, "rollback to return None or the lengths that are left", kept)
        if len(left) != len(asked) or any(
            not 0 <= n <= m for n, m in zip(left, asked, strict=True)
        ):
            raise ValueError(
                f"{self.name}: expected rollback to leave at most {list(asked)} tokens, given "
                f"{left}"
            )
        return list(left)


def _require_logits(
    name: str, logits: Any, shape: tuple[int, int, int], device: torch.device
) -> None:
    """Require logits ``[batch, keep, vocab_size]`` of ``forward`` of level `name`. Messages are
    formatted only before a raise: every pass pays for the checks."""
    if not isinstance(logits, torch.Tensor) or logits.dtype not in LOGITS_DTYPES:
        wrong_kind(name, "forward to return float32, bfloat16 or float16 logits", logits)
    own = logits.device
    if logits.shape != shape:
        wrong = f"of shape [B, keep, vocab_size] = {list(shape)}, given {list(logits.shape)}"
    elif own.type != device.type or (None not in (own.index, device.index) and own != device):
        wrong = f"on the level's device, {device}, given {own}"
    elif logits.layout != torch.strided:
        raise ValueError(
            f"{name}: expected forward to return dense logits, given layout {logits.layout}"
        )
    elif shape[2] > 1 and not logits.is_contiguous() and logits.stride(2) != 1:
        stride = f"stride {logits.stride(2)}; call .contiguous() on them"
        wrong = f"of unit stride along the vocabulary, given {stride}"
    else:
        return
    raise ValueError(f"{name}: expected forward to return logits {wrong}")
