"""The layers of `RollbackCache`: memory of keys and values, appends and reads; masks of attention.

All layers share one `RowLengths`, the lengths of the batch. They have no reference to the cache, so
that a dropped cache is freed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .. import rooms
from ..ops import decoder
from .lengths import RowLengths

# Minimum slots that attention reads on a device; doubled as needed.
DEVICE_BUCKET = 512
_ATTENDED = (torch.float32, torch.bfloat16)


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values ``[B, H, C, D]`` by position: slot p of row b is its token p. Rolls back by
    the lengths alone.

    Attributes:
        window: sliding window of the model's attention, or None. All keys are kept; the mask hides
            old keys.
        takes_blocks: whether a pass of rows of the same length is written as one block.
    """

    keys: Tensor
    values: Tensor
    ring, sinks = False, 0  # how the operator appends
    is_croppable = True
    supports_early_init = False
    takes_blocks = False

    def __init__(self, rows: RowLengths, index: int, window: int | None = None) -> None:
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
        self.rows.memory.clear()

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
            self.rows.memory.clear()
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
        _, status = decoder.append(
            self.keys, self.values, keys, values, base, counts, ring=self.ring, sinks=self.sinks
        )
        if self.index == 0:  # every layer has the same lengths, and so the same status
            rows.status.bitwise_or_(status.to(rows.status.device))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append in a pass that `RollbackCache.update` has checked, and return views for attention:
        ``[B, H, span, Dk]``, and ``[.., Dv]`` values."""
        span = self.rows.span
        self.append(key_states, value_states)
        return self.keys.narrow(2, 0, span), self.values.narrow(2, 0, span)

    def visible(
        self, queries: Tensor, tree: Tensor | None, near: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the slots of `update` that each query sees, ``[B, T, N]`` bool.

        Args:
            queries: [B, T] int64, positions.
            tree: [B, M, M] bool, `ops.trees.ancestors` of the last M tokens, with the new tokens;
                None: a chain.
            near: (window, sinks) of `RollbackCache.inputs`; layers with a window keep theirs.
        """
        rows = self.rows
        window, sinks = (self.window, 0) if near is None or self.is_sliding else near
        if tree is not None:
            before = tree.shape[1] - queries.shape[1]
            base = (rows.base if rows.at is None else rows.at) - before
            return rooms.tree_operators.tree_slots(base, tree, rows.span, window, sinks)[:, before:]
        slots = torch.arange(rows.span, device=queries.device)[None, :]
        return visible_slots(queries, slots, window, sinks)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        rows = self.rows
        prepared = rows.new is not None and self.index not in rows.seen
        return (rows.span if prepared else rows.bound + query_length), 0

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
        self.rows.memory.clear()

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
            self.rows.memory.clear()
            return
        indices = indices.to(self.keys.device)
        self._hold(self.keys.index_select(0, indices), self.values.index_select(0, indices))


# ---- masks and positions -------------------------------------------------------------------------

# All are computed on the device from the lengths, so that no call waits for it. Masks are additive,
# [B, 1, T, N] in the model's dtype: 0 where query i of row b sees slot n, and the dtype's lowest
# value elsewhere. transformers passes a 4-D mask unchanged to eager and sdpa attention.


def query_positions(base: Tensor, counts: Tensor | None, tokens: int) -> Tensor:
    """Return the position of each new token, ``[B, T]`` int64.

    Padding after a row's `counts` repeats the position of its last token (0 in an empty row), so
    that learned positions stay in range.

    Args:
        base: [B] int64, cached lengths.
        counts: [B] int64, new tokens of each row, or None: `tokens` each.
    """
    steps = torch.arange(tokens, device=base.device)
    if counts is None:
        return base[:, None] + steps
    return (base[:, None] + torch.minimum(steps[None, :], counts[:, None] - 1)).clamp_(min=0)


def visible_slots(
    queries: Tensor, slots: Tensor, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Return the slots that each query sees: causal, and within a window but for the sinks.
    ``[B, T, N]`` bool.

    Args:
        queries: [B, T] positions of the queries.
        slots: [B or 1, N] positions in the slots, -1: empty.
        window: a query at position p sees positions above ``p - window``; None: no lower limit.
    """
    held = slots[:, None, :]
    seen = (held <= queries[..., None]) & (held >= 0)
    if window is not None:
        near = held > queries[..., None] - window
        seen = seen & (near if sinks == 0 else near | (held < sinks))
    return seen


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[B, T, N]`` bool as an additive mask of the scores, ``[B, 1, T, N]``."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, hidden
    )[:, None]


# ---- attention -----------------------------------------------------------------------------------


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether `ops.decoder.attention` supports the tensors; on CUDA few tokens."""
    dtype = query.dtype
    if dtype not in _ATTENDED or not (key.dtype == value.dtype == dtype):
        return False
    if mask is not None and not (mask.dim() == 4 and mask.shape[1] == 1 and mask.dtype == dtype):
        return False
    if not (query.shape[3] in decoder.WIDTHS and value.shape[3] in decoder.WIDTHS):
        return False
    device = query.device
    for x in (query, key, value, mask):  # a generator's frames are calls
        if x is not None and not (x.stride(3) == 1 and x.device == device):
            return False
    if query.is_cpu:
        return True
    # The operator reads 16 bytes at a time. (torch's memory begins at a multiple of 16.)
    return (
        query.is_cuda
        and query.shape[2] <= decoder.FEW_TOKENS
        and all(
            offset * x.element_size() % 16 == 0
            for x in (key, value)
            for offset in (x.storage_offset(), *x.stride()[:3])
        )
    )


def attended(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend from the queries ``[B, Hq, T, D]`` to keys ``[B, Hkv, N, D]`` and values by an
    additive mask (None: a query sees all slots, or earlier slots if `causal`). Scores are scaled by
    `scale` (None: ``D ** -0.5``). Returns ``[B, T, Hq, D]``."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if takes(q, keys, values, mask):
        return decoder.attention(q, keys, values, mask, scale, causal)
    grouped = keys.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(
        q, keys, values, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
