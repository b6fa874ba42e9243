"""From per-request host values to operator arguments: a scalar where all rows agree (which costs
nothing), else a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from .sampling import Sampling


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host values. The copy to a CUDA device does not wait for it."""
    table = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return table if device.type == "cpu" else table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. Only between CUDA devices is all that uses either of them ordered
    behind the copy; the host would read, or write over, what is not copied yet."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=tensor.device.type == device.type == "cuda")


_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}


class Parameters:
    """Sampling parameters and seeds of the rows in a batch, as keyword arguments of ``ps.sample``
    and ``ps.verify``.

    Args:
        sampling, seeds: one per row.
    """

    def __init__(self, sampling: Sequence[Sampling], seeds: Sequence[int]) -> None:
        self.sampling, self.seeds = list(sampling), list(seeds)
        self.greedy = all(one.greedy for one in sampling)
        self._made: dict[torch.device, dict[str, Any]] = {}

    def on(self, device: torch.device) -> dict[str, Any]:
        """temperature, top_k, top_p, min_p and seed, in this order. Made once per device."""
        if device not in self._made:
            made: dict[str, Any] = {}
            for name in _DTYPES:
                values = self.values(name)
                same = len(set(values)) == 1
                made[name] = values[0] if same else self.column(name, device)
            self._made[device] = made
        return self._made[device]

    def values(self, name: str) -> list[Any]:
        """Of one of them, by row."""
        return self.seeds if name == "seed" else [getattr(one, name) for one in self.sampling]

    def column(self, name: str, device: torch.device) -> torch.Tensor:
        """The same, ``[B]``; of a seed the 64 bits as torch holds them."""
        values = self.values(name)
        if name == "seed":
            values = [seed - 2**64 if seed >= 2**63 else seed for seed in values]
        return on_device(values, _DTYPES[name], device)


class FixedParameters(Parameters):
    """`Parameters` of B rows at one place on a device, where captured graphs read them anew.

    Args:
        batch: rows, B.
        device: where they lie.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        super().__init__([], [])
        self._written: Parameters | None = None
        self._tensors = {
            name: torch.zeros(batch, dtype=dtype, device=device) for name, dtype in _DTYPES.items()
        }

    def write(self, parameters: Parameters) -> None:
        """Hold these from now on."""
        if self._written is parameters:
            return
        self._written, self.greedy = parameters, parameters.greedy
        self.sampling, self.seeds = parameters.sampling, parameters.seeds
        for name, own in self._tensors.items():
            own.copy_(parameters.column(name, own.device), non_blocking=True)

    def on(self, device: torch.device) -> dict[str, Any]:
        """As of `Parameters`; each ``[B]``."""
        return self._tensors


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """``[B, T]`` int64, right-padded with 0, and how many tokens each row has."""
    counts = [len(row) for row in rows]
    width = max(counts, default=0)
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    return on_device(table, torch.int64, device).view(len(rows), width), counts


def known_ids(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`ids` with those that a smaller vocabulary does not have as 0. That costs a draft level some
    accuracy and no exactness: the distribution that it hands up is still the one it samples
    from."""
    return ids.masked_fill(ids >= vocab_size, 0)


class Place:
    """Memory that a step uses beside its inputs, as part of a graph's key.

    Args:
        owner: whose memory it is. Equal addresses of another owner are another place.
        tensors: all of it.
        form: what else the step's operators depend on, such as sizes that the host knows.

    Attributes:
        owner: a weak reference.
        tensors: address, shape, strides and data type of each.
    """

    __slots__ = ("_hash", "form", "owner", "tensors")

    def __init__(
        self, owner: object, tensors: Iterable[torch.Tensor], form: Hashable = None
    ) -> None:
        self.owner = weakref.ref(owner)
        self.tensors = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)
        self.form = form
        self._hash = hash((self.tensors, form))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Place)
            and self._hash == other._hash
            and self.owner() is other.owner()
            and (self.form, self.tensors) == (other.form, other.tensors)
        )
