"""Passes of a Hugging Face level that can be captured (`base.DeviceLevel`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..kv_cache.layers import RollbackLayer
from ..kv_cache.lengths import round_up
from ..tensors import Place
from .head import gathering


class CapturedPasses:
    """Mixed into `HuggingFaceLevel`: passes whose counts only the device knows."""

    # Where the model's weights lie; None: to be asked anew, since a batch begins.
    _weights: Place | None = None

    _runs: Any
    _cache: Any
    _head: torch.nn.Module
    _slices: bool
    _arguments: dict[str, Any]
    supports_batches: bool
    _member: Any

    def reach(self, tokens: int) -> Place | None:
        """See `DeviceLevel.reserve_span`."""
        self._cache.rows.reach(tokens)
        return self._place(tokens)

    def _place(self, longest: int) -> Place | None:
        """All that passes use beside their inputs while no row gets longer than so many tokens.
        None: the cache has to grow first, which would move it."""
        rows, layers = self._cache.rows, self._cache.layers
        states = [each for layer in layers for each in (layer.keys, layer.values)]
        if longest > min(rows.capacity, *(each.shape[2] for each in states)):
            return None
        if self._weights is None:
            self._weights = Place(
                self._runs, itertools.chain(self._runs.parameters(), self._runs.buffers())
            )
        span = min(round_up(longest, rows.bucket), rows.capacity)
        return Place(
            self._cache,
            [rows.lengths, rows.base, rows.status, *states],
            (rows.capacity, span, self._weights),
        )

    @property
    def stays(self) -> bool:
        """Whether the lengths of the cache at hand can stay on the device for a whole round."""
        # Lengths of a shared cache go up and down between levels, on the host.
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
        """Keep the first ``lengths[b]`` tokens of row b, ``[B]`` int64, read on the device only."""
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
