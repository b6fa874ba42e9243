"""``RowLengths``: how many tokens each row of a cache has, the only owner of that number.

A pass begins here (`RowLengths.begin`) and leaves what its layers read as attributes: where each
row begins, how many tokens it appends, and how many slots attention reads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch

from ..ops.decoder import update_lengths
from ..tensors import RowCounts, on_device


class RowLengths:
    """Lengths of a batch's rows on the device, and their host values or bounds.

    Attributes:
        batch: rows, B.
        lengths: [B] int64, tokens of each row, including the forward pass in progress.
        status: [B] int32, the status bits of all appends (`ops.decoder.CacheStatus`).
        host: the lengths on the host; None: unknown, after counts or lengths as a tensor.
        bound: upper bound of `lengths`; `peak`: of all lengths since the last reset.
        limit: upper bound of all lengths until the host knows the lengths again. With a limit
            below `sys.maxsize` attention reads the same slots in every pass, for few graphs.
        capacity: required slots of a full layer.
        memory: values derived from the addresses of the layers' keys and values, which clear it.
        on_cpu: whether tensors of known lengths are new tensors. Otherwise passes write them at
            once and in place, so that a captured graph includes the writes. Set before the first
            pass. A cut known to the host is written at the next access to the lengths, together
            with other cuts.

    Attributes of the pass in progress, or of the latest pass:
        new: tokens per row of the pass, padding included; None before the first pass.
        counts: [B] int64, new tokens per row; None: `new` each.
        base: [B] int64, the lengths before the pass; `base_bound`: their upper bound.
        at: common base of all rows, if the host knows it and all rows append `new` tokens; else
            None.
        first: whether the pass reads the first tokens of all rows, and the longest row has `new`.
            Attention then reads `new` slots, independent of `bucket`: there are no slots before
            the tokens or after the longest row, so that a causal mask suffices.
        span: slots of a full layer that attention reads.
        seen: layers that have appended.
    """

    def __init__(
        self, batch: int, capacity: int, step: int, bucket: int, device: torch.device
    ) -> None:
        self.step, self.bucket, self.capacity = step, bucket, capacity
        self.device, self.on_cpu = device, device.type == "cpu"
        self.memory: dict[Any, Any] = {}
        self._most = 0
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
        # On the CPU, if the host knows the values, tensors are new tensors, because a reader
        # outside inference mode cannot use tensors written in it.
        self._lengths: torch.Tensor | None
        self._lengths, self.base, self.status = (x[: self.batch] for x in self._memory)
        self._cut = False  # on a device: `host` is ahead of `_lengths`

    def reset(self) -> None:
        for whole in self._memory:
            whole.zero_()
        self._slice()
        self.counts: torch.Tensor | None = None
        self.new: int | None = None
        self.host: list[int] | None = [0] * self.batch
        self.at: int | None = None
        self.first = False
        self.bound = self.base_bound = self.peak = 0
        self.limit = sys.maxsize
        self.span = 0
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
    def ragged(self) -> bool:
        return self.host is None or len(set(self.host)) > 1

    def begin(self, new: int, counts: RowCounts | None, exact: bool = False) -> None:
        """Begin a forward pass of `new` tokens per row, or of the first ``counts[b]`` of them in
        row b. With `exact` attention reads no unused slot."""
        self.counts = None if counts is None else self._unless_all(new, counts)
        before, after, self.at = self.host, None, None
        if before is not None and self.counts is None:
            after = list(map(new.__add__, before))
            if before.count(before[0]) == self.batch:
                self.at = before[0]
        elif before is not None and counts is not None and counts.host is not None:
            after = list(map(int.__add__, before, counts.host))
        if self.on_cpu and after is not None:
            self.base, self._lengths = torch.tensor(before), None
        else:  # in place, for graphs
            self._write_pass(new)
        self.host, self.new, self.base_bound = after, new, self.bound
        self.bound = min(self.bound + new, self.limit) if after is None else max(after)
        self.peak = max(self.peak, self.base_bound + new)
        if self.bound > self.capacity:
            self.make_room(self.bound)
        self.first = self.base_bound == 0 and self.bound == new
        if self.first:
            self.span = new
        else:
            self.span = self.bound or 1 if exact or self.bucket == 1 else self.span_of(self.bound)
        self.seen.clear()

    def _unless_all(self, new: int, counts: RowCounts) -> torch.Tensor | None:
        """Return the counts on the device; None: the host knows that all rows have `new` tokens.
        Refuse other counts than of this batch, up to `new`."""
        known = counts.host
        if known is not None:
            if len(known) != self.batch or min(known) < 0 or max(known) > new:
                raise ValueError(
                    f"counts: expected {self.batch} numbers in [0, {new}], given {list(known)}"
                )
            if min(known) == new:
                return None
        return counts.on(self.device)

    def _write_pass(self, new: int) -> None:
        update_lengths(self.lengths, self.base, None, self.counts, new)

    def span_of(self, longest: int) -> int:
        """Return the slots that attention reads for rows of at most `longest` tokens: `bucket`,
        twice as many, and so on, so that a text has few spans. With a bucket of 1 the span is
        `longest`."""
        span, longest = self.bucket, max(longest, 1)
        if span > 1:
            longest = span << ((longest - 1) // span).bit_length()
        return min(longest, self.capacity)

    def make_room(self, tokens: int) -> None:
        """Set the capacity of full layers to at least `tokens` per row. With a bucket above 1 the
        capacity at least doubles, because moved keys invalidate all graphs."""
        if tokens > self.capacity:
            doubled = 0 if self.bucket == 1 else 2 * self.capacity
            self.capacity = -(-max(tokens, doubled) // self.step) * self.step

    def cut(self, lengths: RowCounts) -> None:
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
            update_lengths(self.lengths, None, lengths.on(self.device), None, 0)
        elif not self.on_cpu:
            self._cut = self._cut or left != self.host
        self.host = left
        if left is not None:
            self._lengths = None if self.on_cpu else self._lengths
            self.bound = max(left, default=0)

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
        if self.host is not None:
            self.bound = max(self.host, default=0)
