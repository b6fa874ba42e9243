"""Hidden states that the drafter has not been told yet, in rounds without host synchronisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..drafters.base import HiddenStates
from ..levels.base import Hidden


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

    def write(self, told: Sequence[HiddenStates]) -> None:
        """Begin with these, oldest first."""
        self.counts.zero_()
        for own in told:
            begin, counts = (
                torch.as_tensor(given, device=self.begin.device)
                for given in (own.positions, own.counts)
            )
            self.add(own.level, own.layers, begin, counts)

    def add(self, level: int, layers: Hidden, begin: torch.Tensor, counts: torch.Tensor) -> None:
        """What a pass of `level` has read and stands; what an earlier one read behind that does
        not.

        Args:
            layers: ``[B, T, H]`` each.
            begin: ``[B]`` int64, position of the first token of each row.
            counts: ``[B]`` int64, tokens of each row; 0 leaves the row as it is.
        """
        part = counts > 0
        first = torch.where(self.counts > 0, torch.minimum(self.begin, begin), begin)
        first = torch.where(part, first, self.begin)
        end = torch.where(part, begin + counts, self.begin + self.counts)
        positions = first[:, None] + torch.arange(self.width, device=first.device)
        place = positions - begin[:, None]
        fresh = (part[:, None] & (place >= 0) & (place < counts[:, None]))[..., None]
        before = (positions - self.begin[:, None]).clamp(0, self.width - 1)
        for layer, states in layers.items():
            own = self._layers.get(layer)
            if own is None or own.shape[2] != states.shape[2] or own.dtype != states.dtype:
                shape = (len(first), self.width, states.shape[2])
                own = self._layers[layer] = states.new_zeros(shape)
            new = _at(states, place.clamp(0, states.shape[1] - 1))
            own.copy_(torch.where(fresh, new, _at(own, before)))
        self.begin.copy_(first)
        self.counts.copy_(end - first)
        self._level = level

    def told(self) -> HiddenStates:
        """All of it, in place."""
        return HiddenStates(self._level, self._layers, self.begin, self.counts)

    def forget(self, part: torch.Tensor) -> None:
        """The drafter knows the states of these rows, ``[B]`` int64 other than 0."""
        self.counts.mul_(part == 0)

    def taken(self) -> list[HiddenStates]:
        """The same for the host, which waits for the device."""
        begin, counts = self.begin.tolist(), self.counts.tolist()
        if not any(counts):
            return []
        layers: Mapping[int, torch.Tensor] = self._layers
        copies = {layer: states.clone() for layer, states in layers.items()}
        return [HiddenStates(self._level, copies, begin, counts)]


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def reach_of(told: Sequence[HiddenStates], batch: int) -> int:
    """Tokens of the longest run of a row, over all passes."""
    longest = 0
    for b in range(batch):
        runs = [(int(own.positions[b]), int(own.counts[b])) for own in told if own.counts[b]]
        if runs:
            end = max(begin + count for begin, count in runs)
            longest = max(longest, end - min(begin for begin, _ in runs))
    return longest
