"""Hidden states of the tokens since the last draft."""

from __future__ import annotations

import functools
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
        device: of `begin` and `end`.
        width: tokens of a row at most, W, at a fixed address, for captured steps: a pass begins
            within the run or right behind it, and has at most 2 W tokens. 0: any number, on the
            CPU, where the host reads them.

    Attributes:
        begin, end: ``[B]`` int64, positions of the first token of each row and behind the last; the
            drafter has been told the states in front of them.
    """

    def __init__(self, batch: int, device: torch.device, width: int = 0) -> None:
        self.width = width
        self.begin = torch.zeros(batch, dtype=torch.int64, device=device)
        self.end = torch.zeros_like(self.begin)
        self._layers: dict[int, torch.Tensor] = {}  # without a width
        # With a width a ring ``[B, size + 1, sum of H]`` of the layers side by side: position p is
        # in slot p % size, and the last slot takes what is not kept.
        self._ring: torch.Tensor | None = None
        self._sizes: dict[int, int] = {}
        self._size = 6 * width
        self._reach = torch.arange(-1, self._size, device=device)
        self._rows = torch.arange(batch, device=device)[:, None]

    @property
    def counts(self) -> torch.Tensor:
        """Return ``[B]`` int64, tokens of each row."""
        return self.end - self.begin

    @property
    def tensors(self) -> list[torch.Tensor]:
        ring = [] if self._ring is None else [self._ring]
        return [self.begin, self.end, self._reach, self._rows, *ring, *self._layers.values()]

    def write(self, other: HiddenWindow) -> None:
        """Copy the states of `other`. Waits for the device where it is another."""
        device, told = self.begin.device, other.states()
        self.begin.copy_(other.begin)
        self.end.copy_(other.begin)
        if told.layers:
            layers = told.layers
            if self.width:
                layers = {layer: states[:, : self.width] for layer, states in layers.items()}
            elif not other.width:  # which may write its own again
                layers = {layer: states.clone() for layer, states in layers.items()}
            self.add(layers, other.begin.to(device), told.counts.to(device, copy=True))

    def add(
        self,
        layers: Hidden,
        begin: torch.Tensor,
        counts: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Add the states of a pass; those of an earlier one behind them are dropped.

        Args:
            layers: ``[B, T, H]`` each; the window keeps them.
            begin: ``[B]`` int64, position of the first token of each row.
            counts: ``[B]`` int64, tokens of each row; 0 leaves the row as it is.
            skipped: ``[B]`` int64, leading ones that keep their earlier states
                (`LevelOutput.skipped`); None: none.
        """
        part, known, end, own_begin = counts > 0, self.end > self.begin, begin + counts, begin
        if skipped is not None:
            own_begin = torch.minimum(begin + skipped.to(begin.device), end)
        if self.width:
            first = torch.where(known, torch.minimum(self.begin, own_begin), own_begin)
            torch.where(part, first, self.begin, out=self.begin)
            self._put(layers, 1 + torch.where(part, begin, self.end), skipped, None)
            torch.where(part, end, self.end, out=self.end)
            return
        if not part.any():
            return
        if skipped is None and not known.any():
            # Nothing to put together.
            self._layers = dict(layers)
            self.begin = torch.where(part, begin, self.begin)
            self.end = self.begin + counts
            return
        first = torch.where(known, torch.minimum(self.begin, own_begin), own_begin)
        first = torch.where(part, first, self.begin)
        end = torch.where(part, end, self.end)
        width = max(1, int((end - first).max()))
        positions = first[:, None] + torch.arange(width)
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
        self.end.copy_(end)

    def _put(
        self,
        layers: Hidden,
        second: torch.Tensor,
        skipped: torch.Tensor | None,
        above: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the states of a pass but for `skipped` ones and those in front of `above`, in few
        operators, since captured steps have them. Returns the positions of the first tokens, which
        are those in front of `second`, in rows without a part of none whose state is told."""
        self._sizes = self._sizes or {layer: states.shape[2] for layer, states in layers.items()}
        apart, ring = [layers[layer] for layer in self._sizes], self._ring
        device = apart[0].device if ring is None else ring.device
        apart = [x.to(device) for x in apart]
        states = torch.cat(apart, -1) if len(apart) > 1 else apart[0]
        positions = second[:, None] + self._reach[: states.shape[1]]
        slots, begin, own = positions % self._size, positions[:, 0], above
        if skipped is not None:
            own = begin + skipped.to(begin.device)
            own = own if above is None else own.maximum(above)
        if own is not None:
            slots.masked_fill_(positions < own[:, None], self._size)
        if ring is None:
            ring = states.new_zeros(len(second), self._size + 1, states.shape[2])
        dtype = torch.promote_types(ring.dtype, states.dtype)  # nothing of either is rounded
        ring = self._ring = ring.to(dtype)
        ring[self._rows.to(device), slots.to(device)] = states.to(dtype)
        return begin

    def add_pass(
        self,
        plan: Plan,
        kept: Sequence[RowCounts],
        level: int,
        layers: Hidden | None,
        skipped: torch.Tensor | None,
        above: torch.Tensor | None,
    ) -> None:
        """Add the states of a verification; if it gives none, drop those of rejected tokens.

        Args:
            kept: cached lengths that remain, of the levels that verify. With a width each of these
                gives states, so the run ends with the longest.
            level: which has verified.
            layers, skipped: of its output.
            above: ``[B]`` int64, cached lengths of the target, whose states replace those of the
                level; None: it gives none.
        """
        device = plan.part.device
        if layers is None:
            lengths = kept[level - 1].on(device)
            self.cut(torch.where(plan.part > 0, lengths, torch.iinfo(lengths.dtype).max))
            return
        if self.width:
            begin = self._put(layers, plan.positions - plan.first, skipped, above)
            torch.minimum(self.begin, begin, out=self.begin)
            first, *others = [each.on(device) for each in kept]
            *between, last = others or [first]
            torch.maximum(functools.reduce(torch.maximum, between, first), last, out=self.end)
            return
        begin = plan.positions - (plan.counts - plan.lengths)
        if above is not None:
            read = (above - begin).clamp_min(0)
            skipped = read if skipped is None else read.maximum(skipped.to(read.device))
        # (Rows without a part have none.)
        self.add(layers, begin, (kept[level - 1].on(device) - begin) * plan.part, skipped)

    def states(self) -> HiddenStates:
        """Return the states, with a width in memory of their own."""
        layers, ring = self._layers, self._ring
        if ring is not None:
            slots = (self.begin[:, None] + self._reach[1 : self.width + 1]) % self._size
            states = ring[self._rows.to(ring.device), slots.to(ring.device)]
            parts = states.split(list(self._sizes.values()), -1)
            layers = dict(zip(self._sizes, parts, strict=True))
        return HiddenStates(layers, self.begin, self.end - self.begin)

    def cut(self, lengths: torch.Tensor) -> None:
        """Drop states behind the first ``lengths[b]`` tokens of row b, ``[B]`` int64."""
        torch.minimum(self.end, lengths, out=self.end)
        torch.minimum(self.begin, lengths, out=self.begin)

    def forget(self, part: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Drop the states of rows whose `part`, ``[B]`` int64, is not 0: the drafter has them. With
        the `counts` of `states` it is 1 there, and few operators are needed."""
        if counts is not None:
            self.begin.addcmul_(counts, part)
            return
        torch.where(part > 0, self.end, self.begin, out=self.begin)
        if not self.width and not (self.end > self.begin).any():
            self._layers = {}  # those of a prompt may be large

    def select(self, rows: Sequence[int | None]) -> None:
        """Keep these rows, in that order; None: one without states."""
        index = [0 if row is None else row for row in rows]
        fresh = torch.tensor([row is None for row in rows], dtype=torch.bool)
        self.begin = self.begin[index].masked_fill(fresh, 0)
        self.end = self.end[index].masked_fill(fresh, 0)
        self._rows = torch.arange(len(index), device=self.begin.device)[:, None]
        self._layers = {layer: states[index] for layer, states in self._layers.items()}
        self._ring = None if self._ring is None else self._ring[index]

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Return whether all of `rows` have states, and no row more than `width`."""
        counts = self.counts
        return bool(counts[list(rows)].all()) and int(counts.max()) <= width


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = places.to(states.device).clamp(0, states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
