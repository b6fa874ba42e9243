"""The lengths of a batch, which all layers of a `RollbackCache` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ..tensors import RowCounts, on_device

# Slots that attention reads on a device: so many, or twice, four times, ... as many.
DEVICE_BUCKET = 512


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Rows:
    """Lengths of a batch's rows, on the device, with what the host knows about them.

    Attributes:
        batch: rows, B.
        lengths: [B] int64, tokens of each row, those of the forward pass in progress included.
        base: [B] int64, the lengths before that pass.
        counts: [B] int64, its new tokens per row, or None: `new` each.
        new: tokens per row of that pass, padding included; None before any.
        status: [B] int32, the status bits of all appends (`ops.kv.CacheStatus`).
        host: the lengths, where the host knows them; None after counts or lengths came as a tensor.
        at: base of every row, where it is one number that the host knows and all rows take `new`
            tokens.
        first: the pass reads the first tokens of all rows, of which one takes `new`. Attention then
            reads as many slots, in whatever multiples it does later: no slot is in front of the
            tokens, and none behind the longest row, so that causality is all there is to a mask.
        bound: no length is above it; `base_bound`: none of `base` is; `peak`: none has been since
            the last reset.
        limit: no row will be longer before the host knows the lengths again, or None: whatever
            passes append meanwhile, attention reads the same slots, so that their graphs are few.
        span: slots of a full layer that attention reads.
        capacity: slots that a full layer must have.
        grow: whether layers have to look if they do; not where the cache has seen to it.
        moves: how often keys and values of a layer have come to lie elsewhere.
        on_cpu: the tensors may be written when somebody asks for them, elsewhere than before.
            Otherwise passes write them at once and in place, so that a captured graph finds the
            writing in it. Set before the first pass. A cut that the host knows is written when the
            lengths are asked for next, behind other cuts.
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
        """Set the number of rows. Lengths and status stay at the addresses of the largest batch so
        far, where a captured graph reads them. A reset follows."""
        self.batch = batch
        if batch > self._most:
            with torch.inference_mode(False):  # so that they can be written in that mode or not
                lengths = torch.zeros(batch, dtype=torch.int64, device=self.device)
                status = torch.zeros(batch, dtype=torch.int32, device=self.device)
                self._memory = lengths, torch.zeros_like(lengths), status
            self._most = batch
        self._slice()

    def _slice(self) -> None:
        # On the CPU, where the host knows the numbers, tensors are made when somebody asks: new
        # ones, since older ones may be of inference mode and the reader outside it.
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
            else:  # a kernel's argument, which is no upload
                self._lengths.fill_(known[0])
            self._cut = False  # last: an interrupt before it has the lengths written again
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
        # Where all rows begin, if the host knows it and it is one number.
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
        """Return the slots that attention reads while no row is longer than so many tokens:
        `bucket`, twice as many, and so on, so that a text sees few spans. With a bucket of 1 these
        are as many as there are tokens."""
        span, longest = bucket or self.bucket, max(longest, 1)
        if span == 1:
            return min(longest, self.capacity)
        span <<= ((longest - 1) // span).bit_length()
        return min(span, self.capacity)

    def make_room(self, tokens: int) -> None:
        """Have every full layer hold so many tokens of a row. Where attention reads spans, the
        capacity at least doubles: keys that move have all graphs captured anew."""
        if tokens > self.capacity:
            doubled = 0 if self.bucket == 1 else 2 * self.capacity
            self.capacity = round_up(max(tokens, doubled), self.step)

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

    def reach(self, limit: int) -> None:
        """Bound all rows by `limit` tokens until `note` is called."""
        self.limit = self.bound = limit

    def note(self, lengths: Sequence[int]) -> None:
        """Note the lengths that the device has reached without the host."""
        self.limit = None
        self.host, self.at = [int(n) for n in lengths], None
        self.bound, self.peak = max(self.host, default=0), self.capacity

    def place(self, lengths: RowCounts) -> None:
        """Set the lengths, to longer ones too; the caller knows that the slots have the tokens.
        Lengths that the host does not know come after `reach`."""
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
        here = torch.tensor(list(slots)).to(self.device, non_blocking=True)
        if self.host is None:
            self.lengths.index_fill_(0, here, 0)
        else:
            gone = set(slots)
            left = [0 if row in gone else n for row, n in enumerate(self.host)]
            self.place(RowCounts(left))
        self.status.index_fill_(0, here, 0)

    def select(self, indices: torch.Tensor) -> None:
        """Select rows, in any order and number; `indices` is an int64 tensor."""
        here = indices.to(self.device)
        lengths, status = self.lengths.index_select(0, here), self.status.index_select(0, here)
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
