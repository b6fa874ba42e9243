"""Hidden states of the tokens since the last draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..drafters.base import HiddenStates
from ..levels.base import Hidden
from ..ops.schedule import Plan
from ..tensors import RowCounts


class HiddenWindow:
    """The states of one run of tokens per row, of several passes; of two the later one's.

    Args:
        batch: rows, B.
        device: of `begin` and `counts`.
        width: tokens of a row at most, W, at a fixed address, for captured steps. 0: any number,
            on the CPU, where the host reads `counts`.

    Attributes:
        begin: ``[B]`` int64, position of the first token of each row; the drafter has been told the
            states in front of it.
        counts: ``[B]`` int64, tokens of each row.
    """

    def __init__(self, batch: int, device: torch.device, width: int = 0) -> None:
        self.width = width
        self.begin = torch.zeros(batch, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.begin)
        self._layers: dict[int, torch.Tensor] = {}
        self._reach = torch.arange(width, device=device)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.begin, self.counts, *self._layers.values()]

    def write(self, other: HiddenWindow) -> None:
        """Copy the states of `other`. Waits for the device where it is another."""
        device = self.begin.device
        self.begin.copy_(other.begin)
        self.counts.zero_()
        if other._layers:
            layers = other._layers
            if not self.width:  # `other` may write its own again
                layers = {layer: states.clone() for layer, states in layers.items()}
            self.add(layers, other.begin.to(device), other.counts.to(device, copy=True))

    def add(
        self,
        layers: Hidden,
        begin: torch.Tensor,
        counts: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Add the states of a pass; those of an earlier one behind them are dropped.

        Args:
            layers: ``[B, T, H]`` each; the window keeps them, and `counts`.
            begin: ``[B]`` int64, position of the first token of each row.
            counts: ``[B]`` int64, tokens of each row; 0 leaves the row as it is.
            skipped: ``[B]`` int64, leading ones that keep their earlier states
                (`LevelOutput.skipped`); None: none.
        """
        part = counts > 0
        if not self.width and not part.any():
            return
        if not self.width and skipped is None and not self.counts.any():
            # Nothing to put together.
            self._layers, self.counts = dict(layers), counts
            self.begin = torch.where(part, begin, self.begin)
            return
        end, own_begin = begin + counts, begin
        if skipped is not None:
            own_begin = torch.minimum(begin + skipped.to(begin.device), end)
        first = torch.where(self.counts > 0, torch.minimum(self.begin, own_begin), own_begin)
        first = torch.where(part, first, self.begin)
        end = torch.where(part, end, self.begin + self.counts)
        width = self.width or max(1, int((end - first).max()))
        if self.width and layers.keys() == self._layers.keys():
            self._move(layers, part, begin, own_begin, first, end)
            return
        positions = first[:, None] + torch.arange(width, device=first.device)
        place = positions - begin[:, None]
        fresh = part[:, None] & (positions >= own_begin[:, None]) & (place < counts[:, None])
        before = positions - self.begin[:, None]
        for layer, states in layers.items():
            own = self._layers.get(layer)
            if own is None:
                own = states.new_zeros(len(first), width, states.shape[2])
            dtype = torch.promote_types(own.dtype, states.dtype)  # nothing of either is rounded
            new, old = _at(states, place).to(own.device, dtype), _at(own, before).to(dtype)
            both = torch.where(fresh[..., None].to(own.device), new, old)
            if own.shape == both.shape and own.dtype == dtype:
                self._layers[layer] = own.copy_(both)
            else:
                self._layers[layer] = both
        self.begin.copy_(first)
        self.counts.copy_(end - first)

    def _move(
        self,
        layers: Hidden,
        part: torch.Tensor,
        begin: torch.Tensor,
        own_begin: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
    ) -> None:
        """Set the window to ``[first, end)``: of rows with a `part` from `own_begin` on states of a
        pass that begins at `begin`, else its earlier ones. Few operators, since captured steps have
        them."""
        positions = first[:, None] + self._reach
        # Earlier states and later ones side by side; what lies behind the end is anything.
        fresh = part[:, None] & (positions >= own_begin[:, None])
        at = positions - torch.where(fresh, (begin - self.width)[:, None], self.begin[:, None])
        for layer, states in layers.items():
            own = self._layers[layer]
            dtype = torch.promote_types(own.dtype, states.dtype)
            both = torch.cat([own.to(dtype), states.to(own.device, dtype)], 1)
            moved = _at(both, at)
            if own.dtype == dtype:
                own.copy_(moved)
            else:  # nothing of either is rounded
                self._layers[layer] = moved
        self.begin.copy_(first)
        torch.sub(end, first, out=self.counts)

    def add_pass(
        self,
        plan: Plan,
        kept: RowCounts,
        layers: Hidden | None,
        skipped: torch.Tensor | None,
        above: torch.Tensor | None,
    ) -> None:
        """Add the states of a verification; if it gives none, drop those of rejected tokens.

        Args:
            kept: cached lengths of the level that remain.
            layers, skipped: of its output.
            above: ``[B]`` int64, cached lengths of the target, whose states replace those of the
                level; None: it gives none.
        """
        if layers is None:
            lengths = kept.on(plan.part.device)
            most = torch.iinfo(lengths.dtype).max
            self.cut(torch.where(plan.part > 0, lengths, most))
            return
        begin = plan.positions - (plan.counts - plan.lengths)
        if above is not None:
            read = (above - begin).clamp_min(0)
            skipped = read if skipped is None else read.maximum(skipped.to(read.device))
        # (Rows without a part have none.)
        self.add(layers, begin, (kept.on(begin.device) - begin) * plan.part, skipped)

    def states(self) -> HiddenStates:
        """Return the states, not copied."""
        return HiddenStates(self._layers, self.begin, self.counts)

    def cut(self, lengths: torch.Tensor) -> None:
        """Drop states behind the first ``lengths[b]`` tokens of row b, ``[B]`` int64."""
        end = torch.minimum(self.begin + self.counts, lengths)
        torch.minimum(self.begin, lengths, out=self.begin)
        torch.sub(end, self.begin, out=self.counts)

    def forget(self, part: torch.Tensor) -> None:
        """Drop the states of rows whose `part`, ``[B]`` int64, is 1 and not 0: the drafter has
        them."""
        told = self.counts * part
        self.begin.add_(told)
        self.counts.sub_(told)
        if not self.width and not self.counts.any():
            self._layers = {}  # those of a prompt may be large

    def select(self, rows: Sequence[int | None]) -> None:
        """Keep these rows, in that order; None: one without states."""
        index = [0 if row is None else row for row in rows]
        fresh = torch.tensor([row is None for row in rows], dtype=torch.bool)
        self.begin = self.begin[index].masked_fill(fresh, 0)
        self.counts = self.counts[index].masked_fill(fresh, 0)
        self._layers = {layer: states[index] for layer, states in self._layers.items()}

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Return whether all of `rows` have states, and no row more than `width`."""
        return bool(self.counts[list(rows)].all()) and int(self.counts.max()) <= width


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = places.to(states.device).clamp(0, states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
