"""Rows that enter and leave a `RollbackCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layers import RollbackLayer
from .lengths import Rows, round_up


class RowsComeAndGo:
    """Mixed into `RollbackCache`."""

    rows: Rows
    layers: list[Any]

    def refit(self, batch_size: int) -> bool:
        """Begin an empty batch of so many rows in the memory at hand. False, and nothing done,
        where that is too small, or more than twice what is needed."""
        if all(type(layer) is RollbackLayer for layer in self.layers):
            # Rows may have left since the memory was made.
            if not all(batch_size <= layer.held <= 2 * batch_size for layer in self.layers):
                return False
        elif batch_size != self.rows.batch:
            return False
        if batch_size != self.rows.batch:
            self.rows.resize(batch_size)
        self.reset()  # type: ignore[attr-defined]
        return True

    def take(self, other: RowsComeAndGo, rows: Sequence[int]) -> None:
        """Row ``rows[b]`` becomes row b of `other`, a cache of the same model, whatever it was.

        Args:
            other: a cache that keeps every key in one run of slots per row, as this one does, and
                whose lengths the host knows.

        Raises:
            ValueError: either cache does not.
        """
        mine, theirs = self.rows, other.rows
        kinds = {type(layer) for layer in (*self.layers, *other.layers)}
        if kinds != {RollbackLayer} or mine.host is None or theirs.host is None:
            raise ValueError(
                "expected caches of RollbackLayer whose lengths the host knows, given layers of "
                f"{', '.join(sorted(kind.__name__ for kind in kinds))}"
            )
        lengths = list(mine.host)
        for row, length in zip(rows, theirs.host, strict=True):
            lengths[row] = length
        mine.capacity = max(mine.capacity, round_up(max(lengths), mine.step))
        index = torch.tensor(list(rows))
        for layer, filled in zip(self.layers, other.layers, strict=True):
            layer.take(filled, index)
        mine.place(lengths)
        mine.status.index_copy_(0, index.to(mine.status.device), theirs.status)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order; rows may leave, move and repeat."""
        self.rows.select(indices)
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))
