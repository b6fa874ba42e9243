"""Layers of a streaming `RollbackCache`: attention sinks and a window of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import arguments
from .layers import RollbackLayer, visible_slots
from .lengths import RowLengths
from .rollback import SINKS

# Models that rotate the two halves of a key's rotary dimensions, the layout of `turn`.
_ROTATE_HALVES = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
# Types of rotary positions with frequencies that do not depend on the length.
_FIXED = ("default", "linear", "llama3")


def window_of(streaming: int | Mapping[str, int]) -> dict[str, int]:
    """Return the options of a streaming cache: window and, if given, sinks and slack."""
    if not isinstance(streaming, Mapping):
        return {"window": arguments.integer("streaming", streaming, arguments.SIZE_MAX, 1)}
    if "window" not in streaming or not set(streaming) <= {"window", "sinks", "slack"}:
        raise ValueError(
            f"streaming: expected a window, or a dict with window and, if wanted, sinks and slack, "
            f"given a dict of {', '.join(map(str, streaming)) or 'nothing'}"
        )
    return dict(streaming)


def near_of(streaming: int | Mapping[str, int], name: str) -> tuple[int, int]:
    """Return window and sinks (`RollbackCache.inputs`) of a level called `name` that reads them in
    the cache of another level."""
    given = window_of(streaming)
    if "slack" in given:
        raise ValueError(f"{name}: the shared cache keeps all tokens: remove slack from streaming")
    window = arguments.integer("window", given["window"], arguments.SIZE_MAX, 1)
    return window, arguments.integer("sinks", given.get("sinks", SINKS), arguments.SIZE_MAX)


def streaming_layers(
    model: Any, rows: RowLengths, types: Sequence[str], window: int, slack: int, sinks: int
) -> list[StreamingLayer]:
    """Return the layers of `RollbackCache.streaming`; types: kinds of attention of the layers."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    kind = getattr(rotary, "rope_type", "default")
    if model.config.model_type not in _ROTATE_HALVES or frequencies is None or kind not in _FIXED:
        raise ValueError(
            f"{type(model).__name__}: a streaming cache moves keys to other positions, which needs "
            f"rotary positions of a known layout ({', '.join(_ROTATE_HALVES)}; {', '.join(_FIXED)}"
            f"); given {model.config.model_type}"
        )
    frequencies = frequencies.float()
    return [StreamingLayer(rows, i, window, slack, sinks, frequencies) for i in range(len(types))]


def ring_positions(ends: Tensor, capacity: int, sinks: int) -> Tensor:
    """Return the position in each slot of a ring after positions ``[0, ends[b])`` are written,
    ``[B, capacity]``; -1: empty.

    Args:
        ends: [B] int64.
        capacity: slots, including `sinks` slots before the ring.
    """
    slots = torch.arange(capacity, device=ends.device)
    last = ends[:, None] - 1
    # The highest written position that maps to the slot; below `sinks` in a slot not yet written.
    held = last - torch.remainder(last - slots, capacity - sinks)
    held = torch.where(held >= sinks, held, -1)
    return torch.where(slots < sinks, torch.where(slots <= last, slots, -1), held)


def turn(keys: Tensor, shift: Tensor, frequencies: Tensor) -> Tensor:
    """Turn keys ``[B, H, S, D]``, rotated for position p, to ``p + shift[b]``; shift [B] int64."""
    half = frequencies.shape[0]
    angles = (shift[:, None].double() * frequencies.double())[:, None, None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = keys[..., :half].double(), keys[..., half : 2 * half].double()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(keys.dtype)
    return torch.cat([turned, keys[..., 2 * half :]], -1)


class StreamingLayer(RollbackLayer):
    """Attention sinks and a window, for draft levels: `sinks` first tokens and a ring of ``window +
    slack`` latest tokens; a query sees the sinks and `window` tokens (Xiao et al. 2024, arXiv
    2309.17453). The cost of a draft level is then independent of the context length; the target
    stays exact, because it verifies against the distribution that the drafter drew from.

    Rotary attention depends on distances alone. So instead of moving the window down after the
    sinks, as the paper does, the sinks' keys are rotated up to just before the window: a few
    vectors per pass.

    Distances to the sinks are exact for a pass's first query, and i too long for query i. A pass
    has at most ``slack + 1`` tokens (split a prompt), and a rollback at most `slack`: later tokens
    overwrite older keys."""

    ring = True

    def __init__(
        self, rows: RowLengths, index: int, window: int, slack: int, sinks: int, frequencies: Tensor
    ) -> None:
        super().__init__(rows, index, window)
        self.slack, self.sinks = slack, sinks
        self.size = sinks + window + slack
        self.frequencies = frequencies

    def _slots(self) -> int:
        return self.size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.frequencies = self.frequencies.to(key_states.device)
        self.sink_keys = self._room(key_states)[:, :, : self.sinks].clone()  # before the shift
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        sinks = self.keys[:, :, : self.sinks]
        sinks.copy_(self.sink_keys)
        self.append(key_states, value_states)
        self.sink_keys.copy_(sinks)
        assert self.window is not None
        evicted = (self.rows.base.to(self.device) - (self.window - 1 + self.sinks)).clamp(min=0)
        sinks.copy_(turn(self.sink_keys, evicted, self.frequencies))
        return self.keys, self.values

    def visible(
        self, queries: Tensor, tree: Tensor | None, near: tuple[int, int] | None = None
    ) -> Tensor:
        rows = self.rows
        if tree is not None:
            raise ValueError(
                "a tree's path cannot be moved in a ring of keys: expected a cache that keeps all"
            )
        if rows.new is not None and rows.new > self.slack + 1:
            raise ValueError(
                f"tokens: expected at most {self.slack + 1} in one pass over a streaming cache, "
                f"given {rows.new}"
            )
        slots = ring_positions(rows.lengths, self.size, self.sinks)
        return visible_slots(queries, slots, self.window, self.sinks)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.sink_keys.zero_()

    def select(self, indices: Tensor) -> None:
        super().select(indices)
        if self.is_initialized:
            self.sink_keys = self.sink_keys.index_select(0, indices.to(self.sink_keys.device))
