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
        # With a width ``[B, size + 1, H]``: position p lies in slot p % size, and the last slot
        # takes what is not kept.
        self._layers: dict[int, torch.Tensor] = {}
        self._size = 6 * width
        self._reach = torch.arange(self._size, device=device)
        self._rows = torch.arange(batch, device=device)[:, None]

    @property
    def counts(self) -> torch.Tensor:
        """Return ``[B]`` int64, tokens of each row."""
        return self.end - self.begin

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.begin, self.end, *self._layers.values()]

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
            self._put(layers, torch.where(part, begin, self.end), own_begin)
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

    def _put(self, layers: Hidden, begin: torch.Tensor, own: torch.Tensor | None) -> None:
        """Write the states of a pass that begins at `begin`, in rows without a part behind their
        run, from position `own` on; None: all."""
        tokens = max(states.shape[1] for states in layers.values())
        positions = begin[:, None] + self._reach[:tokens]
        slots = positions % self._size
        if own is not None:
            slots.masked_fill_(positions < own[:, None], self._size)
        for layer, states in layers.items():
            kept = self._layers.get(layer)
            if kept is None:
                kept = states.new_zeros(len(begin), self._size + 1, states.shape[2])
            dtype = torch.promote_types(kept.dtype, states.dtype)  # nothing of either is rounded
            kept = self._layers[layer] = kept.to(dtype)
            kept[self._rows.to(kept.device), slots.to(kept.device)] = states.to(kept.device, dtype)

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
        lengths = kept.on(plan.part.device)
        if layers is None:
            most = torch.iinfo(lengths.dtype).max
            self.cut(torch.where(plan.part > 0, lengths, most))
            return
        # Where a row reads on; of rows without a part the end of the text.
        begin = plan.positions - (plan.counts - plan.lengths)
        if self.width:
            own = above
            if skipped is not None:
                own = begin + skipped.to(begin.device)
                own = own if above is None else own.maximum(above)
            torch.minimum(self.begin, begin, out=self.begin)
            self._put(layers, begin, own)
            torch.where(plan.part > 0, lengths, self.end, out=self.end)
            return
        if above is not None:
            read = (above - begin).clamp_min(0)
            skipped = read if skipped is None else read.maximum(skipped.to(read.device))
        # (Rows without a part have none.)
        self.add(layers, begin, (lengths - begin) * plan.part, skipped)

    def states(self) -> HiddenStates:
        """Return the states, with a width in memory of their own."""
        layers = self._layers
        if self.width:
            slots = (self.begin[:, None] + self._reach[: self.width]) % self._size
            layers = {
                layer: own[self._rows.to(own.device), slots.to(own.device)]
                for layer, own in layers.items()
            }
        return HiddenStates(layers, self.begin, self.end - self.begin)

    def cut(self, lengths: torch.Tensor) -> None:
        """Drop states behind the first ``lengths[b]`` tokens of row b, ``[B]`` int64."""
        torch.minimum(self.end, lengths, out=self.end)
        torch.minimum(self.begin, lengths, out=self.begin)

    def forget(self, part: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Drop the states of rows whose `part`, ``[B]`` int64, is not 0 and, with `counts`, 1: the
        drafter has them. `counts`: of `states`; None: computed."""
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
        self._rows = torch.arange(len(index))[:, None]
        self._layers = {layer: states[index] for layer, states in self._layers.items()}

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Return whether all of `rows` have states, and no row more than `width`."""
        counts = self.counts
        return bool(counts[list(rows)].all()) and int(counts.max()) <= width


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = places.to(states.device).clamp(0, states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
