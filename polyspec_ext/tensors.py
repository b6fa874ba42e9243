"""Tensors of host values: counts, lengths and parameters of the rows of a batch; maps of ids; graph
keys of memory."""

from __future__ import annotations

import copy
import operator
import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, cast

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


class RowCounts(Sequence[int]):
    """An integer per row of a batch, such as its length or its number of tokens in a pass.

    The numbers are on the host, on the device, or both. Read `host` if it is not None, and `on` for
    the device. Reading them as a sequence waits for the device if only the device has them.

    Args:
        host: the numbers; None: only the device has them.
        tensor: ``[B]`` int64, the same numbers; None: created from `host` at the first `on`.
    """

    __slots__ = ("_tensor", "host")

    def __init__(self, host: Sequence[int] | None, tensor: torch.Tensor | None = None) -> None:
        self.host = None if host is None else tuple(host)
        self._tensor: Any = tensor

    @classmethod
    def of(cls, given: Sequence[int] | torch.Tensor) -> RowCounts:
        """Return the counts of integers ``[B]``, or of a tensor, which the host does not read."""
        if isinstance(given, torch.Tensor):
            return cls(None, given.to(torch.int64))
        return given if type(given) is cls else cls(given)

    @classmethod
    def read(cls, tensor: torch.Tensor, on_host: bool) -> RowCounts:
        """Return the counts of a tensor ``[B]`` int64, which the host reads if `on_host`."""
        return cls(tensor.tolist() if on_host else None, tensor)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return ``[B]`` int64 on `device`; cached for the latest device."""
        tensor = self._tensor
        if tensor is None or tensor.device != device:
            known = self.host is not None
            tensor = on_device(self.host, torch.int64, device) if known else moved(tensor, device)
            self._tensor = tensor
        return cast(torch.Tensor, tensor)

    def less(self, by: int, most: int | None = None) -> RowCounts:
        """Return ``max(n - by, 0)`` for each number n, at most `most`."""
        if self.host is None:
            fewer = self._tensor - by if by else self._tensor
            return RowCounts(None, fewer.clamp(0, most))
        numbers = map(max, map(operator.sub, self.host, repeat(by)), repeat(0))
        return RowCounts(tuple(numbers if most is None else map(min, numbers, repeat(most))))

    def all(self, number: int) -> bool:
        """Return whether every number is `number`; False if the host does not have them."""
        return self.host is not None and self.host.count(number) == len(self.host)

    def __len__(self) -> int:
        return len(self._tensor if self.host is None else self.host)

    def __getitem__(self, row: Any) -> Any:
        return tuple(self)[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensor.tolist() if self.host is None else self.host)


class RowLengths:
    """Lengths of a batch's rows on the device, and their host values or bounds.

    Attributes:
        batch: rows, B.
        lengths: [B] int64, tokens of each row, including the forward pass in progress.
        base: [B] int64, the lengths before the pass.
        counts: [B] int64, new tokens per row of the pass; None: `new` each.
        new: tokens per row of the pass, padding included; None before the first pass.
        status: [B] int32, the status bits of all appends (`ops.kv.CacheStatus`).
        host: the lengths on the host; None: unknown, after counts or lengths as a tensor.
        at: common base of all rows, if the host knows it and all rows append `new` tokens; else
            None.
        first: whether the pass reads the first tokens of all rows, and the longest row has `new`.
            Attention then reads `new` slots, independent of `bucket`: there are no slots before
            the tokens or after the longest row, so that a causal mask suffices.
        bound: upper bound of `lengths`; `base_bound`: of `base`; `peak`: of all lengths since the
            last reset.
        limit: upper bound of all lengths until the host knows the lengths again; None: no bound.
            With a limit attention reads the same slots in every pass, for few graphs.
        span: slots of a full layer that attention reads.
        capacity: required slots of a full layer.
        grow: whether layers must check their capacity; False after a check by the cache.
        moves: number of changes of the address of a layer's keys and values.
        on_cpu: whether tensors are computed on access, at a new address. Otherwise passes write
            them at once and in place, so that a captured graph includes the writes. Set before the
            first pass. A cut known to the host is written at the next access to the lengths,
            together with other cuts.
    """

    def __init__(
        self, batch: int, capacity: int, step: int, bucket: int, device: torch.device
    ) -> None:
        self.step, self.bucket, self.capacity = step, bucket, capacity
        self.device, self.on_cpu = device, device.type == "cpu"
        self._most = self.moves = 0
        self.resize(batch)
        self.reset()

    def resize(self, batch: int) -> None:
        """Set the number of rows. Lengths and status keep the addresses of the largest batch so
        far, which captured graphs read. A reset must follow."""
        self.batch = batch
        if batch > self._most:
            with torch.inference_mode(False):  # writable inside and outside inference mode
                lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
                status = torch.zeros(batch, dtype=torch.int32, device=self.device)
                self._memory = lengths, torch.zeros_like(lengths), status
            self._most = batch
        self._slice()

    def _slice(self) -> None:
        # On the CPU, if the host knows the values, tensors are created on access: new tensors,
        # because a reader outside inference mode cannot use tensors created in it.
        self._lengths: torch.Tensor | None
        self._base: torch.Tensor | None
        self._lengths, self._base, self.status = (x[: self.batch] for x in self._memory)
        self._cut = False  # on a device: `host` is ahead of `_lengths`

    def reset(self) -> None:
        for whole in self._memory:
            whole.zero_()
        self._slice()
        self.counts: torch.Tensor | None = None
        self.new: int | None = None
        self.host: list[int] | None = [0] * self.batch
        self._base_host: list[int] = self.host
        self.at: int | None = None
        self.first = False
        self.bound = self.base_bound = self.peak = 0
        self.limit: int | None = None
        self.span = 0
        self.grow = True
        self.seen: set[int] = set()

    @property
    def lengths(self) -> torch.Tensor:
        if self._lengths is None:
            self._lengths = torch.tensor(self.host)
        elif self._cut:
            known = cast(list[int], self.host)
            if self.ragged:
                self._lengths.copy_(on_device(known, torch.int64, self.device))
            else:  # a kernel argument needs no upload
                self._lengths.fill_(known[0])
            self._cut = False  # last: after an interrupt the lengths are written again
        return self._lengths

    @property
    def base(self) -> torch.Tensor:
        if self._base is None:
            self._base = torch.tensor(self._base_host)
        return self._base

    @property
    def ragged(self) -> bool:
        return self.host is None or len(set(self.host)) > 1

    def begin(self, new: int, counts: RowCounts | None, bucket: int | None = None) -> None:
        """Begin a forward pass of `new` tokens per row. Lengths change in place, for graphs."""
        before = self.host
        # Whether the host knows that all rows begin at the same position.
        even = before is not None and before.count(before[0]) == self.batch
        after: list[int] | None = None
        if counts is None:
            self.counts = None
            if before is not None:
                after = [before[0] + new] * self.batch if even else [n + new for n in before]
        else:
            known = counts.host
            if known is not None:
                if len(known) != self.batch or min(known) < 0 or max(known) > new:
                    raise ValueError(
                        f"counts: expected {self.batch} numbers in [0, {new}], given {list(known)}"
                    )
                if before is not None:
                    after = list(map(int.__add__, before, known))
            whole = known is not None and min(known) == new
            self.counts = None if whole else counts.on(self.device)
        if self.on_cpu and before is not None and after is not None:
            self._base_host, self._lengths, self._base = before, None, None
        else:
            self.base.copy_(self.lengths)
            self.lengths.add_(new if self.counts is None else self.counts.clamp(0, new))
        self.at = before[0] if even and before is not None and self.counts is None else None
        self.host = after
        self.base_bound = self.bound
        if after is not None:
            self.bound = max(after, default=0)
        else:
            self.bound = self.bound + new if self.limit is None else self.limit
        self.peak = max(self.peak, self.base_bound + new)
        if self.bound > self.capacity:
            self.make_room(self.bound)
        begins = before is not None and not any(before) and self.limit is None
        self.first = begins and self.bound == new
        if self.first:
            self.span = new
        elif (bucket or self.bucket) == 1:
            self.span = min(self.bound or 1, self.capacity)
        else:
            self.span = self.span_of(self.bound, bucket)
        self.new = new
        self.grow = True
        self.seen.clear()

    def span_of(self, longest: int, bucket: int | None = None) -> int:
        """Return the slots that attention reads for rows of at most `longest` tokens: `bucket`,
        twice as many, and so on, so that a text has few spans. With a bucket of 1 the span is
        `longest`."""
        span, longest = bucket or self.bucket, max(longest, 1)
        if span == 1:
            return min(longest, self.capacity)
        span <<= ((longest - 1) // span).bit_length()
        return min(span, self.capacity)

    def make_room(self, tokens: int) -> None:
        """Set the capacity of full layers to at least `tokens` per row. With a bucket above 1 the
        capacity at least doubles, because moved keys invalidate all graphs."""
        if tokens > self.capacity:
            doubled = 0 if self.bucket == 1 else 2 * self.capacity
            self.capacity = -(-max(tokens, doubled) // self.step) * self.step

    def cut(self, lengths: RowCounts, bound: int | None) -> None:
        """Keep at most ``lengths[b]`` tokens of row b."""
        known = lengths.host
        if known is not None:
            if len(known) != self.batch or min(known, default=0) < 0:
                raise ValueError(
                    f"lengths: expected {self.batch} numbers >= 0, given {list(known)}"
                )
            self.bound = min(self.bound, max(known, default=0))
        left = None if known is None or self.host is None else list(map(min, self.host, known))
        if left is None:
            now = self.lengths
            torch.minimum(now, lengths.on(self.device), out=now).clamp_(min=0)
        elif not self.on_cpu:
            self._cut = self._cut or left != self.host
        self.host = left
        if left is not None:
            self._lengths = None if self.on_cpu else self._lengths
            self.bound = max(left, default=0)
        if bound is not None:
            self.bound = min(self.bound, bound)

    def assign(self, lengths: RowCounts) -> None:
        """Set the lengths, longer lengths included; the caller ensures that the slots have the
        tokens. Lengths unknown to the host require a `limit`."""
        known = lengths.host
        if known is None or not self.on_cpu:
            self.lengths.copy_(lengths.on(self.device), non_blocking=True)
        self.host = None
        if known is not None:
            self._lengths = None if self.on_cpu else self._lengths
            self.host, self.bound = list(known), max(known, default=0)
            self.peak = max(self.peak, self.bound)

    def clear(self, slots: Sequence[int]) -> None:
        """Clear the rows `slots`."""
        index = torch.tensor(list(slots)).to(self.device, non_blocking=True)
        if self.host is None:
            self.lengths.index_fill_(0, index, 0)
        else:
            gone = set(slots)
            left = [0 if row in gone else n for row, n in enumerate(self.host)]
            self.assign(RowCounts(left))
        self.status.index_fill_(0, index, 0)

    def select(self, indices: torch.Tensor) -> None:
        """Select rows, in any order and number; `indices` is an int64 tensor."""
        index = indices.to(self.device)
        lengths, status = self.lengths.index_select(0, index), self.status.index_select(0, index)
        self.resize(lengths.shape[0])
        self.lengths.copy_(lengths)
        self.base.zero_()
        self.status.copy_(status)
        self.counts, self.new, self.at, self.seen = None, None, None, set()
        if self.host is not None and not self.ragged:
            self.host = self.host[:1] * int(indices.shape[0])
        elif self.host is not None:
            # Reading indices on a device would wait for it.
            on_host = indices.device.type == "cpu"
            self.host = [self.host[i] for i in indices.tolist()] if on_host else None
        self._base_host = [0] * self.batch
        if self.host is not None:
            self.bound = max(self.host, default=0)


_OFF: dict[str, int | float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_PARAMETERS = (*_OFF, "seed")


class RowParameters:
    """Sampling parameters and seeds of B rows: a tensor ``[B]`` of each on `device`, at a constant
    address, for captured steps; `sampling` and `seeds` are the same on the host, empty before the
    first `write`. `greedy`: every row's temperature is 0."""

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
        self._on = {self._device: {**self._tensors, **off}}
        # Seeds in [0, 2**64) as the same bits in int64.
        bits = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
        for name, tensor in self._tensors.items():
            values = bits if name == "seed" else [getattr(row, name) for row in sampling]
            tensor.copy_(on_device(values, tensor.dtype, tensor.device), non_blocking=True)
        self.seeds = seeds
        self.sampling = sampling
        return self

    def on(self, device: torch.device) -> dict[str, torch.Tensor | float]:
        """Return temperature, top_k, top_p, min_p and seed, in this order: keyword arguments of
        `ps.sample` and `ps.verify`. A parameter that is off in all sampling rows is a number
        instead of a tensor, for smaller kernels."""
        if device not in self._on:
            self._on[device] = {
                name: moved(value, device) if isinstance(value, torch.Tensor) else value
                for name, value in self._on[self._device].items()
            }
        return self._on[device]


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


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Return ``[B, T]`` int64, right-padded with 0, and the number of tokens of each row."""
    counts = [len(row) for row in rows]
    width = max(counts, default=0)
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    return on_device(table, torch.int64, device).view(len(rows), width), counts


def gather(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``states[b, rows[b, j]]``, ``[B, keep, H]``, of states ``[B, T, H]`` and rows
    ``[B, keep]`` int64 in [0, T), on any device."""
    index = rows.to(states.device, non_blocking=True)[..., None]
    return states.gather(1, index.expand(-1, -1, states.shape[2]))


class MemoryKey:
    """A graph key for the memory that a step uses beside its inputs.

    Args:
        owner: owner of the memory, kept as a weak reference. Equal addresses of different owners
            are different keys.
        tensors: all tensors of it, kept as address, shape, strides and data type of each.
        form: other inputs of the step's operators, such as sizes that the host knows.
        span: slots that attention reads. Steps that differ only in `span` share their set-up.
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

    def of_any_span(self) -> MemoryKey:
        """Return the key of the same memory without the span."""
        other = copy.copy(self)
        other.span, other._hash = None, hash((self.tensors, self.form, None))
        return other

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, MemoryKey)
            and self._hash == other._hash
            and self.owner() is other.owner()
            and (self.form, self.span, self.tensors) == (other.form, other.span, other.tensors)
        )
