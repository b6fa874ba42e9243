"""The streaming variant of `RollbackCache`: attention sinks and a window, for draft levels.

Xiao et al. 2024 (arXiv 2309.17453): a model that sees only its first few tokens and the latest ones
goes on working, if distances are taken within the cache, as though what lies between had never
been. A drafter's cost then stops growing with the context. The target stays exact, since whatever
distribution a drafter samples from is the one it hands up.

Attention with rotary positions depends on distances alone, so two ways to place positions are the
same: to move the window down to follow the sinks, as the paper does, or to leave the window where
it is and move the sinks up behind it. The second turns only the sinks' keys, a few vectors per
pass, and leaves the window's as they were computed.
"""

from __future__ import annotations

from typing import Any

import torch

from .layers import RingLayer
from .lengths import Rows

# Models that rotate the two halves of a key's rotary part, the layout that `turn` knows.
_ROTATE_HALVES = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3")
# Kinds of rotary positions whose frequencies do not change with the length.
_FIXED = ("default", "linear", "llama3")


def rotary_frequencies(model: Any, name: str) -> torch.Tensor:
    """The model's rotary frequencies, [R / 2] float32.

    Raises:
        ValueError: positions are not rotary in a layout known here; names the model.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    kind = getattr(rotary, "rope_type", "default")
    if model.config.model_type not in _ROTATE_HALVES or frequencies is None or kind not in _FIXED:
        raise ValueError(
            f"{name}: a streaming cache moves keys to other positions, which needs rotary "
            f"positions of a known layout ({', '.join(_ROTATE_HALVES)}; {', '.join(_FIXED)}); "
            f"given {model.config.model_type}"
        )
    found: torch.Tensor = frequencies.float()
    return found


def turn(keys: torch.Tensor, shift: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Keys ``[B, H, S, D]``, rotated for position p, as for ``p + shift[b]``; shift [B] int64."""
    half = frequencies.shape[0]
    angles = (shift[:, None].double() * frequencies.double())[:, None, None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = keys[..., :half].double(), keys[..., half : 2 * half].double()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(keys.dtype)
    return torch.cat([turned, keys[..., 2 * half :]], -1)


class StreamingLayer(RingLayer):
    """`sinks` first tokens and a ring of ``window + slack`` latest ones; a query sees the sinks and
    `window` tokens.

    Distances to the sinks are those of a pass's first query; for query i they are i too long. At
    most ``slack + 1`` tokens go in one pass (feed a prompt in pieces), and at most `slack` can be
    rolled back.
    """

    def __init__(
        self, rows: Rows, index: int, window: int, slack: int, sinks: int, frequencies: torch.Tensor
    ) -> None:
        super().__init__(rows, index, window, slack, sinks)
        self.frequencies = frequencies

    @property
    def longest_pass(self) -> int:  # type: ignore[override]
        return self.slack + 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.frequencies = self.frequencies.to(key_states.device)
        self.sink_keys = self._room(key_states)[:, :, : self.sinks].clone()  # as they were computed
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_prepared(key_states, value_states)
        sinks = self.keys[:, :, : self.sinks]
        sinks.copy_(self.sink_keys)
        self.append(key_states, value_states)
        self.sink_keys.copy_(sinks)
        assert self.window is not None
        evicted = (self.rows.base.to(self.device) - (self.window - 1 + self.sinks)).clamp(min=0)
        sinks.copy_(turn(self.sink_keys, evicted, self.frequencies))
        return self.keys, self.values

    def visible(self, queries: torch.Tensor, tree: torch.Tensor | None) -> torch.Tensor:
        if self._wide():
            raise ValueError(
                f"tokens: expected at most {self.slack + 1} in one pass over a streaming cache, "
                f"given {self.rows.new}"
            )
        return super().visible(queries, tree)

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.sink_keys.zero_()

    def clear(self, rows: torch.Tensor) -> None:
        super().clear(rows)
        if self.is_initialized:
            self.sink_keys.index_fill_(0, rows.to(self.sink_keys.device), 0)

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        if self.is_initialized:
            self.sink_keys = self.sink_keys.index_select(0, indices.to(self.sink_keys.device))
