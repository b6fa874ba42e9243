"""Tensors of host values: counts, lengths and parameters of the rows of a batch; maps of ids."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, NamedTuple, cast

import torch

from .sampling import Sampling


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of host values. A copy to a CUDA device is asynchronous."""
    table = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return table if device.type == "cpu" else table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. The copy is asynchronous only between CUDA devices, where later
    uses are ordered after it; the host could read or overwrite memory before the copy."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=tensor.device.type == device.type == "cuda")


@dataclass(slots=True, eq=False)
class RowCounts(Sequence[int]):
    """An integer per row of a batch, such as its length or its number of tokens in a pass.

    The numbers are on the host, on the device, or both. Read `host` if it is not None, and `on` for
    the device. Reading them as a sequence waits for the device if only the device has them.

    Args:
        host: the numbers; None: only the device has them.
        tensor: ``[B]`` int64, the same numbers; None: created from `host` at the first `on`.
    """

    host: Sequence[int] | None
    tensor: Any = None

    @classmethod
    def of(cls, given: Sequence[int] | torch.Tensor) -> RowCounts:
        """Return the counts of integers ``[B]``, or of a tensor, which the host does not read."""
        if isinstance(given, torch.Tensor):
            return cls(None, given.to(torch.int64))
        return given if type(given) is cls else cls(tuple(given))

    @classmethod
    def read(cls, tensor: torch.Tensor, on_host: bool) -> RowCounts:
        """Return the counts of a tensor ``[B]`` int64, which the host reads if `on_host`."""
        return cls(tensor.tolist() if on_host else None, tensor)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return ``[B]`` int64 on `device`; cached for the latest device."""
        tensor = self.tensor
        if tensor is None or tensor.device != device:
            known = self.host is not None
            tensor = on_device(self.host, torch.int64, device) if known else moved(tensor, device)
            self.tensor = tensor
        return cast(torch.Tensor, tensor)

    def less(self, by: int, most: int | None = None) -> RowCounts:
        """Return ``max(n - by, 0)`` for each number n, at most `most`."""
        if self.host is None:
            fewer = self.tensor - by if by else self.tensor
            return RowCounts(None, fewer.clamp(0, most))
        numbers = map(max, map(operator.sub, self.host, repeat(by)), repeat(0))
        return RowCounts(tuple(numbers if most is None else map(min, numbers, repeat(most))))

    def all(self, number: int) -> bool:
        """Return whether every number is `number`; False if the host does not have them."""
        return self.host is not None and self.host.count(number) == len(self.host)

    def __len__(self) -> int:
        return len(self.tensor if self.host is None else self.host)

    def __getitem__(self, row: Any) -> Any:
        return tuple(self)[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tensor.tolist() if self.host is None else self.host)


class Plan(NamedTuple):
    """Work of the rows of a batch in a step; each ``[B]`` int64.

    Attributes:
        part: 1 in rows of the step; 0 in idle rows, where `counts`, `first` and `lengths` are 0.
        counts: tokens that the level has to read.
        first: index among them of the token with the logits that verify the first pending token.
        lengths: tokens to draft or to verify.
        positions: absolute position of the first token to draft or to verify.
        rounds: round counts, which key the draws.
        of_tail: tokens of a tail among `lengths`: all or none in a draft; in the target's
            verification the last tokens.
    """

    part: torch.Tensor
    counts: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    rounds: torch.Tensor
    of_tail: torch.Tensor


_OFF: dict[str, int | float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_PARAMETERS = (*_OFF, "seed")


class _ByDevice(dict[torch.device, dict[str, torch.Tensor | float]]):
    """Parameters by device, copied from those of `source` at the first access."""

    def __init__(self, source: torch.device) -> None:
        self.source = source

    def __missing__(self, device: torch.device) -> dict[str, torch.Tensor | float]:
        self[device] = {
            name: moved(value, device) if isinstance(value, torch.Tensor) else value
            for name, value in self[self.source].items()
        }
        return self[device]


class RowParameters:
    """Sampling parameters and seeds of B rows: a tensor ``[B]`` of each on `device`, at a constant
    address, for captured steps; `sampling` and `seeds` are the same on the host, empty before the
    first `write`. `greedy`: every row's temperature is 0. `by_device`: results of `on`."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.sampling: Sequence[Sampling] = ()
        self.seeds: Sequence[int] = ()
        self.greedy, self._device = True, device
        kinds = {float: torch.float32, int: torch.int64}
        self.tensors = {
            name: torch.zeros(batch, dtype=kinds[type(_OFF.get(name, 0))], device=device)
            for name in _PARAMETERS
        }
        self.by_device: dict[torch.device, dict[str, torch.Tensor | float]] = _ByDevice(device)

    def write(self, sampling: Sequence[Sampling], seeds: Sequence[int]) -> RowParameters:
        """Write the parameters of all rows. Returns itself."""
        if (self.sampling, self.seeds) == (sampling, seeds):
            return self
        # `sampling` and `seeds` are set last: after an interrupt they equal no parameters.
        self.sampling, self.seeds = (), ()
        self.greedy = all(row.greedy for row in sampling)
        # (Filters of a greedy row have no effect.)
        off = {
            name: value
            for name, value in _OFF.items()
            if all(row.greedy or getattr(row, name) == value for row in sampling)
        }
        self.by_device.clear()
        self.by_device[self._device] = {**self.tensors, **off}
        # Seeds in [0, 2**64) as the same bits in int64.
        bits = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
        for name, tensor in self.tensors.items():
            values = bits if name == "seed" else [getattr(row, name) for row in sampling]
            tensor.copy_(on_device(values, tensor.dtype, tensor.device), non_blocking=True)
        self.seeds = seeds
        self.sampling = sampling
        return self

    def on(self, device: torch.device) -> dict[str, torch.Tensor | float]:
        """Return temperature, top_k, top_p, min_p and seed, in this order: keyword arguments of
        `ps.sample` and `ps.verify`. A parameter that is off in all sampling rows is a number
        instead of a tensor, for smaller kernels."""
        return self.by_device[device]


class IdMap:
    """Map between ids of a chain's text, which are the target's, and ids of a model of the chain.

    The identity by default. A model may read fewer ids than the text has, and draw only some of the
    ids that it reads.

    Args:
        vocab_size: exclusive upper bound of ids that the model reads.
        drawn: ``[Vd]`` int64, strictly increasing, below `vocab_size`: the id of each entry of the
            model's rows of logits. None: entry i has id i.
        text_size: exclusive upper bound of ids of the text; None: `vocab_size`.

    Attributes:
        reads_all: whether `to_below` changes nothing.
    """

    def __init__(
        self, vocab_size: int, drawn: torch.Tensor | None = None, text_size: int | None = None
    ) -> None:
        self.vocab_size, self.drawn = vocab_size, drawn
        self.reads_all = text_size is None or text_size <= vocab_size
        if drawn is None:
            return
        if drawn.dim() != 1 or drawn.dtype != torch.int64 or not len(drawn):
            raise ValueError(
                f"drawn: expected int64 [Vd], Vd >= 1, given {drawn.dtype} {list(drawn.shape)}"
            )
        self._known: list[int] = drawn.tolist()  # on the host, for every draft
        if not all(a < b for a, b in pairwise((-1, *self._known, vocab_size))):
            raise ValueError(f"drawn: expected increasing ids in [0, {vocab_size}), given others")
        # The last entry is for index -1: a token that could not be drawn stays -1.
        self._table = torch.cat([drawn, drawn.new_tensor([-1])])

    def of_text(self, text_size: int) -> IdMap:
        """Return the same map for a text with ids below `text_size`."""
        return IdMap(self.vocab_size, self.drawn, text_size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the map, for the keys of captured graphs."""
        return [] if self.drawn is None else [self._table]

    def to_below(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids of the text to ids that the model reads, unknown ids to 0. That costs a draft
        some acceptance but stays exact: the level above verifies against the distribution that was
        sampled from."""
        return ids if self.reads_all else ids.masked_fill(ids >= self.vocab_size, 0)

    def to_above(self, entries: torch.Tensor) -> torch.Tensor:
        """Map entries of a row of logits to ids of the text; -1 stays -1."""
        return entries if self.drawn is None else self._table[entries]

    def entries_below(self, vocab_size: int) -> int:
        """Count the leading entries of a row of logits with ids below `vocab_size`."""
        if self.drawn is None:
            return min(self.vocab_size, vocab_size)
        return bisect_left(self._known, vocab_size)

    def spread(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Spread rows of logits, ``[..., at most Vd]``, over all ids below `vocab_size`: -inf for
        ids that the model does not draw."""
        ids = self.to_above(torch.arange(rows.shape[-1], device=rows.device))
        full = rows.new_full((*rows.shape[:-1], vocab_size), -float("inf"))
        return full.index_copy_(full.dim() - 1, ids, rows)

    def gather(self, rows: torch.Tensor, entries: int) -> torch.Tensor:
        """Gather the first `entries` entries of the model's rows out of rows over all ids."""
        if self.drawn is None:
            return rows[..., :entries]
        return rows.index_select(-1, self.drawn[:entries])

    def target_to_draft(self, vocab_size: int) -> torch.Tensor | None:
        """Return ``[vocab_size]`` int32: for each id of the level above its entry in a row of
        logits, -1: no entry. None: entry i is id i, up to the row's width."""
        if self.drawn is None:
            return None
        known = self.drawn[: self.entries_below(vocab_size)]
        entries = torch.full((vocab_size,), -1, dtype=torch.int32, device=known.device)
        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device)
        return entries


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two texts."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, pad: int = 0
) -> tuple[torch.Tensor, list[int]]:
    """Return ``[B, T]`` int64, right-padded with `pad`, and the number of tokens of each row."""
    counts = [len(row) for row in rows]
    width = max(counts, default=0)
    table = [[*row, *[pad] * (width - len(row))] for row in rows]
    return on_device(table, torch.int64, device).view(len(rows), width), counts
