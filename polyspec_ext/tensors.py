"""From host values to tensors: rows of a batch, their numbers and parameters, where they lie."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, cast

import torch

from .sampling import Sampling


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of host values. The copy to a CUDA device does not wait for it."""
    table = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return table if device.type == "cpu" else table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. Only between CUDA devices is all that uses either of them
    ordered behind the copy; the host would read, or write over, what is not copied yet."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=tensor.device.type == device.type == "cuda")


class RowCounts(Sequence[int]):
    """One number of each row of a batch, such as its length or how many tokens of a pass are its.

    Whoever knows the numbers on the host says so, and whoever does not gives the tensor alone. A
    reader takes `host` where that is something, and `on` where the device needs them. As a sequence
    it waits for the device where the host does not know them.

    Args:
        host: the numbers; None: the device alone knows them.
        tensor: ``[B]`` int64, the same; None: it is made of `host` when somebody asks.
    """

    __slots__ = ("_tensor", "host")

    def __init__(self, host: Sequence[int] | None, tensor: torch.Tensor | None = None) -> None:
        self.host = None if host is None else tuple(host)
        self._tensor: Any = tensor

    @classmethod
    def of(cls, given: Sequence[int] | torch.Tensor) -> RowCounts:
        """Take integers ``[B]`` of a user, or a tensor of them, which is not read."""
        if isinstance(given, torch.Tensor):
            return cls(None, given.to(torch.int64))
        return given if type(given) is cls else cls(given)

    @classmethod
    def read(cls, tensor: torch.Tensor, on_host: bool) -> RowCounts:
        """Take a tensor ``[B]`` int64, which the host reads where `on_host` allows it."""
        return cls(tensor.tolist() if on_host else None, tensor)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return ``[B]`` int64 on `device`; made once."""
        own = self._tensor
        if own is None or own.device != device:
            known = self.host is not None
            own = on_device(self.host, torch.int64, device) if known else moved(own, device)
            self._tensor = own
        return cast(torch.Tensor, own)

    def less(self, by: int, most: int | None = None) -> RowCounts:
        """Return ``max(n - by, 0)`` of each number n, at most `most`."""
        if self.host is None:
            fewer = self._tensor - by if by else self._tensor
            return RowCounts(None, fewer.clamp(0, most))
        own = map(max, map(operator.sub, self.host, repeat(by)), repeat(0))
        return RowCounts(tuple(own if most is None else map(min, own, repeat(most))))

    def all(self, number: int) -> bool:
        """Return whether the host knows that every number is `number`."""
        return self.host is not None and self.host.count(number) == len(self.host)

    def __len__(self) -> int:
        return len(self._tensor if self.host is None else self.host)

    def __getitem__(self, row: Any) -> Any:
        return tuple(self)[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensor.tolist() if self.host is None else self.host)


_OFF: dict[str, int | float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_PARAMETERS = (*_OFF, "seed")


class RowParameters:
    """Sampling parameters and seeds of B rows, one tensor ``[B]`` of each on `device`, at one
    place, where captured steps read them anew; `sampling` and `seeds` are the same on the host,
    empty before the first `write`. `greedy`: every row's temperature is 0."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.sampling: Sequence[Sampling] = ()
        self.seeds: Sequence[int] = ()
        self.greedy, self._device = True, device
        kinds = {float: torch.float32, int: torch.int64}
        self._tensors = {
            name: torch.zeros(batch, dtype=kinds[type(_OFF.get(name, 0))], device=device)
            for name in _PARAMETERS
        }
        self._on: dict[torch.device, dict[str, torch.Tensor | float]] = {}

    def write(self, sampling: Sequence[Sampling], seeds: Sequence[int]) -> RowParameters:
        """Hold these from now on. Returns itself."""
        if (self.sampling, self.seeds) == (sampling, seeds):
            return self
        # What an interrupt leaves half written equals no parameters: they are noted last.
        self.sampling, self.seeds = (), ()
        self.greedy = all(one.greedy for one in sampling)
        # (What filters a greedy row has does not matter.)
        off = {
            name: value
            for name, value in _OFF.items()
            if all(one.greedy or getattr(one, name) == value for one in sampling)
        }
        self._on = {self._device: {**self._tensors, **off}}
        # A tensor holds the 64 bits of a seed as torch has them.
        bits = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
        for name, own in self._tensors.items():
            values = bits if name == "seed" else [getattr(one, name) for one in sampling]
            own.copy_(on_device(values, own.dtype, own.device), non_blocking=True)
        self.seeds = seeds
        self.sampling = sampling
        return self

    def on(self, device: torch.device) -> dict[str, torch.Tensor | float]:
        """Return temperature, top_k, top_p, min_p and seed, in this order: keyword arguments of
        `ps.sample` and `ps.verify`. A number where no row has the filter set, or all have
        temperature 0, since kernels that know it are smaller."""
        if device not in self._on:
            self._on[device] = {
                name: moved(own, device) if isinstance(own, torch.Tensor) else own
                for name, own in self._on[self._device].items()
            }
        return self._on[device]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common from the first on."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Return ``[B, T]`` int64, right-padded with 0, and the number of tokens of each row."""
    counts = [len(row) for row in rows]
    width = max(counts, default=0)
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    return on_device(table, torch.int64, device).view(len(rows), width), counts


class Place:
    """Memory that a step uses beside its inputs, as part of a graph's key.

    Args:
        owner: whose memory it is, kept as a weak reference. Equal addresses of another owner are
            another place.
        tensors: all of it, kept as address, shape, strides and data type of each.
        form: what else the step's operators depend on, such as sizes that the host knows.
        span: slots that attention reads. Steps that differ in it alone set up nothing anew.
    """

    __slots__ = ("_hash", "form", "owner", "span", "tensors")

    def __init__(
        self,
        owner: object,
        tensors: Iterable[torch.Tensor],
        form: Hashable = None,
        span: int | None = None,
    ) -> None:
        self.owner = weakref.ref(owner)
        self.tensors = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)
        self.form, self.span = form, span
        self._hash = hash((self.tensors, form, span))

    def of_any_span(self) -> Place:
        """Return the same memory, whatever the span."""
        other = copy.copy(self)
        other.span, other._hash = None, hash((self.tensors, self.form, None))
        return other

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Place)
            and self._hash == other._hash
            and self.owner() is other.owner()
            and (self.form, self.span, self.tensors) == (other.form, other.span, other.tensors)
        )
