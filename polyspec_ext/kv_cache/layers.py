"""The layers of `RollbackCache`: memory of keys and values, appends and reads.

All layers share one `Rows`, the lengths of the batch. They have no reference to the cache, so that
a dropped cache is freed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..ops import kv as cache_ops
from ..tensors import RowCounts, on_device
from . import masks as cache_masks

# Minimum slots that attention reads on a device; doubled as needed.
DEVICE_BUCKET = 512


class Rows:
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
        self._lengths: Tensor | None
        self._base: Tensor | None
        self._lengths, self._base, self.status = (x[: self.batch] for x in self._memory)
        self._cut = False  # on a device: `host` is ahead of `_lengths`

    def reset(self) -> None:
        for whole in self._memory:
            whole.zero_()
        self._slice()
        self.counts: Tensor | None = None
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
    def lengths(self) -> Tensor:
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
    def base(self) -> Tensor:
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

    def place(self, lengths: RowCounts) -> None:
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
            self.place(RowCounts(left))
        self.status.index_fill_(0, index, 0)

    def select(self, indices: Tensor) -> None:
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


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values ``[B, H, C, D]`` by position: slot p of row b is its token p. Rolls back by
    the lengths alone.

    Attributes:
        window: sliding window of the model's attention, or None. All keys are kept; the mask hides
            old keys.
        takes_blocks: whether `RollbackCache.update` may write a prepared pass without further
            checks; as one block if all rows have the same length.
    """

    keys: Tensor
    values: Tensor
    longest_pass = sys.maxsize  # tokens of a row
    ring, sinks = False, 0  # how the operator appends
    bounds_rollback = False  # whether later tokens overwrite tokens of a longer rollback
    takes_rows = True  # consecutive slots per row, with movable bytes
    is_croppable = True
    supports_early_init = False
    takes_blocks = False

    def __init__(self, rows: Rows, index: int, window: int | None = None) -> None:
        super().__init__()
        self.rows, self.index, self.window = rows, index, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._hold(self._room(key_states), self._room(value_states))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.on_cpu = self.device.type == "cpu"
        self.takes_blocks = self.on_cpu and type(self) is RollbackLayer
        self.is_initialized = True

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        # Both together, so that after an interrupt both sizes agree (see `reset`).
        self._all = keys, values
        self.keys, self.values = self._all
        self.rows.moves += 1

    @property
    def held(self) -> int:
        """Number of rows with memory, including rows that have left."""
        return self._all[0].shape[0] if self.is_initialized else self.rows.batch

    def _slots(self) -> int:
        return self.rows.capacity

    def _room(self, like: Tensor) -> Tensor:
        # Zeros, because a masked slot still contributes weight 0 times its value.
        return like.new_zeros(like.shape[0], like.shape[1], self._slots(), like.shape[3])

    def grow(self) -> None:
        if self.keys.shape[2] < self._slots():
            old_keys, old_values = self.keys, self.values
            keys, values = self._room(old_keys), self._room(old_values)
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[:, :, : old_values.shape[2]] = old_values
            self._hold(keys, values)

    def admit(self, rows: Sequence[int], new: int) -> None:
        """Empty the rows `rows`, of which `new` follow the last row: in the memory of rows that
        have left, or in new memory."""
        if not self.is_initialized:
            return
        if new:
            batch, (keys, values) = self.keys.shape[0], self._all
            if keys.shape[0] < batch + new:
                size = max(batch + new, 2 * batch)
                keys, values = (x.new_zeros(size, *x.shape[1:]) for x in self._all)
                keys[:batch], values[:batch] = self.keys, self.values
                self._hold(keys, values)
            self.keys, self.values = keys[: batch + new], values[: batch + new]
            self.rows.moves += 1
        for row in rows:  # a NaN in a masked slot would spread
            self.keys[row].zero_()
            self.values[row].zero_()

    def put(self, keys: Tensor, values: Tensor, begin: int) -> None:
        """Write keys and values ``[H, N, D]`` to the slots of a single row from `begin` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        self.grow()
        self.keys[0, :, begin : begin + keys.shape[1]] = keys
        self.values[0, :, begin : begin + values.shape[1]] = values

    def take(self, other: RollbackLayer, rows: Tensor) -> None:
        """Copy the rows of `other` to the rows `rows` (int64 indices)."""
        if not self.is_initialized:
            batch = self.rows.batch
            like = (x[:1].expand(batch, -1, -1, -1) for x in (other.keys, other.values))
            self.lazy_initialization(*like)
        self.grow()
        rows, filled = rows.to(self.device), other.rows.bound
        self.keys[rows, :, :filled] = other.keys[:, :, :filled]
        self.values[rows, :, :filled] = other.values[:, :, :filled]

    def _begin(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, tokens = self.rows, key_states.shape[2]
        if not self._prepared():
            if rows.ragged:
                raise ValueError(
                    "rows have different lengths: pass the model **cache.inputs(tokens) "
                    "for every forward pass"
                )
            # The model masks nothing for a single new token, so the span must have no spare slots.
            rows.begin(tokens, None, bucket=1)
        if tokens != rows.new or key_states.shape[0] != rows.batch:
            raise ValueError(
                f"expected {rows.new} new tokens in {rows.batch} rows, as prepared; "
                f"given {tokens} in {key_states.shape[0]}"
            )
        rows.seen.add(self.index)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if rows.grow:
            self.grow()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append new keys and values ``[B, H, T, D]`` at each row's length."""
        rows = self.rows
        base, counts = rows.base, rows.counts
        if base.device != self.device:  # layers on several devices
            base, counts = base.to(self.device), None if counts is None else counts.to(self.device)
        # The operator requires unit stride along the vector, the usual case.
        if keys.stride(3) != 1 and keys.shape[3] > 1:
            keys = keys.contiguous()
        if values.stride(3) != 1 and values.shape[3] > 1:
            values = values.contiguous()
        _, status = cache_ops.append(
            self.keys, self.values, keys, values, base, counts, ring=self.ring, sinks=self.sinks
        )
        if self.index == 0:  # every layer has the same lengths, and so the same status
            rows.status.bitwise_or_(status.to(rows.status.device))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append, and return views for attention: ``[B, H, span, Dk]``, and ``[.., Dv]`` values."""
        self._begin(key_states, value_states)
        self.append(key_states, value_states)
        span = self.rows.span
        return self.keys.narrow(2, 0, span), self.values.narrow(2, 0, span)

    def visible(self, queries: Tensor, tree: Tensor | None) -> Tensor:
        """Return the slots of `update` that each query sees, ``[B, T, N]`` bool.

        Args:
            queries: [B, T] int64, positions.
            tree: [B, M, M] bool, the ancestors (`masks.ancestors`) of the last M tokens, including
                the new tokens; None: a chain.
        """
        rows = self.rows
        if tree is not None:
            before = tree.shape[1] - queries.shape[1]
            base = (rows.base if rows.at is None else rows.at) - before
            return cache_masks.tree_slots(base, tree, rows.span, self.window)[:, before:]
        slots = torch.arange(rows.span, device=queries.device)[None, :]
        return cache_masks.visible_slots(queries, slots, self.window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.rows.span if self._prepared() else self.rows.bound + query_length), 0

    def _prepared(self) -> bool:
        return self.rows.new is not None and self.index not in self.rows.seen

    def get_seq_length(self) -> int:
        """Return the host's bound of the longest row, before a pass in progress."""
        rows = self.rows  # asked in every pass
        prepared = rows.new is not None and self.index not in rows.seen
        return rows.base_bound if prepared else rows.bound

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name in older releases of transformers 5

    def reset(self) -> None:
        # A NaN in a masked slot would still spread, so the next request starts from zeros.
        if not self.is_initialized:
            return
        # The host does not know how many slots captured graphs have written.
        dirty = min(self.rows.peak, self._slots()) if self.on_cpu else self._slots()
        for whole in self._all:
            whole[:, :, :dirty].zero_()
        self.keys, self.values = (whole[: self.rows.batch] for whole in self._all)
        self.rows.moves += 1

    def select(self, indices: Tensor) -> None:
        """Select rows, in any order and number; `indices` is an int64 tensor."""
        if not self.is_initialized:
            return
        chosen = indices.tolist() if self.on_cpu else []
        if chosen and all(row >= slot for slot, row in enumerate(chosen)):
            # Rows move up in the same memory, which the next batch reuses.
            for slot, row in enumerate(chosen):
                if slot != row:
                    self.keys[slot].copy_(self.keys[row])
                    self.values[slot].copy_(self.values[row])
            self.keys, self.values = self.keys[: len(chosen)], self.values[: len(chosen)]
            self.rows.moves += 1
            return
        indices = indices.to(self.keys.device)
        self._hold(self.keys.index_select(0, indices), self.values.index_select(0, indices))
