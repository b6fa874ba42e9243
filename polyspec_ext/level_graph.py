"""Passes of a Hugging Face level that can be captured (`captured.CapturableLevel`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .level_head import gathering
from .rollback_layers import RollbackLayer
from .rollback_rows import round_up


class CapturedPasses:
    """Mixed into `HuggingFaceLevel`: passes whose counts only the device knows."""

    _runs: Any
    _cache: Any
    _head: torch.nn.Module
    _slices: bool
    _arguments: dict[str, Any]
    supports_batches: bool
    _member: Any

    def graph_key(self, passes: Sequence[int]) -> Hashable | None:
        """See `CapturableLevel`. Caches of one run of slots per row can be captured, once they are
        allocated and while they need not grow."""
        cache = self._cache
        if self._member is not None:  # lengths go up and down between levels, on the host
            return None
        if not self.supports_batches or not self._in_one_place():
            return None
        rows, spans = cache.rows, []
        bound = rows.bound
        for tokens in passes:
            bound += tokens
            spans.append(min(round_up(bound, rows.bucket), rows.capacity))
        if bound > min(rows.capacity, cache.layers[0].keys.shape[2]):
            return None
        return (cache.layers[0].keys.data_ptr(), rows.batch, rows.capacity, *spans)

    def reach(self, tokens: int) -> Hashable | None:
        """See `ResidentLevel`."""
        cache = self._cache
        rows = cache.rows
        rows.reach(tokens)
        if tokens > min(rows.capacity, cache.layers[0].keys.shape[2]):
            return None
        span = min(round_up(tokens, rows.bucket), rows.capacity)
        return (cache.layers[0].keys.data_ptr(), rows.batch, rows.capacity, span)

    @property
    def stays(self) -> bool:
        """See `ResidentLevel`."""
        return self._member is None and self.supports_batches and self._in_one_place()

    def _in_one_place(self) -> bool:
        """The cache is of one run of slots per row, allocated, and on one device: a model that is
        spread over several passes its states between them."""
        cache = self._cache
        return all(
            type(layer) is RollbackLayer
            and layer.is_initialized
            and layer.keys.device == cache.rows.status.device
            for layer in cache.layers
        )

    def keep(self, lengths: torch.Tensor) -> None:
        """See `ResidentLevel`."""
        self._cache.rollback(lengths)

    def passed(self, lengths: Sequence[int]) -> None:
        """The rows hold so many tokens now."""
        self._cache.rows.note(lengths)

    def forward_captured(
        self, tokens: torch.Tensor, keep: int, counts: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """`forward` with ``[B]`` tensors, which are read on the device only."""
        arguments = {**self._arguments, **self._cache.inputs(tokens.shape[1], counts)}
        if self._slices:
            arguments["logits_to_keep"] = 0
        wanted = first[:, None] + torch.arange(keep, device=first.device)
        with gathering(self._head, wanted.clamp_max(tokens.shape[1] - 1)):
            out = self._runs(input_ids=tokens, past_key_values=self._cache, **arguments)
        logits: torch.Tensor = out.logits
        return logits
