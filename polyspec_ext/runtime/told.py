"""Hidden states that the drafter has not been told yet: pass by pass where the host reads what came
of each step (`StatesList`), put together elsewhere (`StatesWindow`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..drafters.base import HiddenStates
from ..levels.base import Hidden


class StatesList:
    """The states of several passes, oldest first."""

    def __init__(self) -> None:
        self.passes: list[HiddenStates] = []

    def add(
        self,
        level: int,
        layers: Hidden,
        begin: torch.Tensor,
        counts: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """See `StatesWindow.add`."""
        ends = (begin + counts).tolist()
        for told in self.passes:
            for row, count in enumerate(counts.tolist()):
                if count:
                    left = ends[row] - told.positions[row]
                    told.counts[row] = max(0, min(told.counts[row], left))
        if skipped is not None and skipped.any():
            layers = {layer: _behind(states, skipped) for layer, states in layers.items()}
            skipped = skipped.to(begin.device)
            begin, counts = begin + skipped, (counts - skipped).clamp_min(0)
        self.passes.append(HiddenStates(level, dict(layers), begin.tolist(), counts.tolist()))

    def told(self) -> tuple[HiddenStates, ...]:
        return tuple(self.passes)

    def forget(self, part: torch.Tensor) -> None:
        """The drafter knows the states of these rows, ``[B]`` int64 other than 0; those of others
        are told again."""
        known = [row for row, own in enumerate(part.tolist()) if own]
        for told in self.passes:
            for row in known:
                told.counts[row] = 0
        self.passes = [told for told in self.passes if any(told.counts)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        self.passes = [told.select(rows) for told in self.passes]

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Whether all of `rows` have states, and no row's run of tokens is longer than `width`."""
        if not all(any(own.counts[row] for own in self.passes) for row in rows):
            return False
        batch = len(self.passes[0].counts)
        for b in range(batch):
            runs = [(own.positions[b], own.counts[b]) for own in self.passes if own.counts[b]]
            if runs and max(map(sum, runs)) - min(begin for begin, _ in runs) > width:
                return False
        return True


class StatesWindow:
    """The states of one run of tokens per row, put together of several passes: where two have a
    token, the later one's. All of it stays where it is, for captured steps.

    Args:
        batch: rows, B.
        width: tokens of a row at most, W.
        device: of the states.

    Attributes:
        begin: ``[B]`` int64, absolute position of each row's first token.
        counts: ``[B]`` int64, tokens of each row.
    """

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        self.width = width
        self.begin = torch.zeros(batch, dtype=torch.int64, device=device)
        self.counts = torch.zeros_like(self.begin)
        self._layers: dict[int, torch.Tensor] = {}
        self._level = 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.begin, self.counts, *self._layers.values()]

    def write(self, told: StatesList) -> None:
        """Begin with these."""
        self.counts.zero_()
        for own in (one for one in told.passes if any(one.counts)):
            begin, counts = (
                torch.as_tensor(given, device=self.begin.device)
                for given in (own.positions, own.counts)
            )
            self.add(own.level, own.layers, begin, counts)

    def add(
        self,
        level: int,
        layers: Hidden,
        begin: torch.Tensor,
        counts: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """What a pass of `level` has read and stands; what an earlier one read behind that does
        not.

        Args:
            layers: ``[B, T, H]`` each.
            begin: ``[B]`` int64, position of the first token of each row.
            counts: ``[B]`` int64, tokens of each row; 0 leaves the row as it is.
            skipped: ``[B]`` int64, of these, the leading ones whose states stand as they were told
                before (`LevelOutput.skipped`); None: none.
        """
        part = counts > 0
        own_begin = begin if skipped is None else begin + skipped.to(begin.device)
        first = torch.where(self.counts > 0, torch.minimum(self.begin, own_begin), own_begin)
        first = torch.where(part, first, self.begin)
        end = torch.where(part, begin + counts, self.begin + self.counts)
        positions = first[:, None] + torch.arange(self.width, device=first.device)
        place = positions - begin[:, None]
        fresh = part[:, None] & (positions >= own_begin[:, None]) & (place < counts[:, None])
        before = positions - self.begin[:, None]
        for layer, states in layers.items():
            own = self._layers.get(layer)
            if own is None or own.shape[2] != states.shape[2] or own.dtype != states.dtype:
                shape = (len(first), self.width, states.shape[2])
                own = self._layers[layer] = states.new_zeros(shape)
            new = _at(states, place)
            own.copy_(torch.where(fresh[..., None], new, _at(own, before)))
        self.begin.copy_(first)
        self.counts.copy_(end - first)
        self._level = level

    def told(self) -> tuple[HiddenStates, ...]:
        """All of it, in place."""
        return (HiddenStates(self._level, self._layers, self.begin, self.counts),)

    def forget(self, part: torch.Tensor) -> None:
        """The drafter knows the states of these rows, ``[B]`` int64 other than 0."""
        self.counts.mul_(part == 0)

    def taken(self) -> StatesList:
        """The same for the host, which waits for the device."""
        made = StatesList()
        copies = {layer: states.clone() for layer, states in self._layers.items()}
        made.add(self._level, copies, self.begin, self.counts)
        return made


def _behind(states: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """From column ``skipped[b]`` on; the last ones are repeated."""
    columns = torch.arange(states.shape[1], device=states.device)
    return _at(states, columns + skipped.to(states.device)[:, None])


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = places.clamp(0, states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))
