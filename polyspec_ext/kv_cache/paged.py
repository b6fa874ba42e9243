"""The paged variant of `RollbackCache`: rows hold pages of a common pool, and a rollback frees
them.

Memory follows what rows hold and not the longest of them. Attention here reads a contiguous copy of
each row's pages, which an attention kernel that takes a block table would not need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops import kv as cache_ops
from .layers import RollbackLayer, unit_stride
from .lengths import Rows, round_up


class PagedRows(Rows):
    """Lengths, and the block table that all layers share.

    Attributes:
        table: [B, M] int32, page ids of each row; grows with the longest row.
        held: [B] int64, pages that each row holds.
        free, free_count: [pages] int32 and [1] int64, the free list on the device.
        pages: pages of the pool, in every layer.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        step: int,
        bucket: int,
        device: torch.device,
        page_size: int,
    ) -> None:
        self.page_size = page_size
        self.pages = batch * self._pages_for(capacity)
        self.table = torch.empty(batch, 0, dtype=torch.int32, device=device)
        self.held = torch.zeros(batch, dtype=torch.int64, device=device)
        self.free = torch.arange(self.pages, dtype=torch.int32, device=device)
        self.free_count = torch.full((1,), self.pages, device=device)
        super().__init__(batch, capacity, step, bucket, device)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def reset(self) -> None:
        super().reset()
        self.table.fill_(-1)
        self.held.zero_()
        torch.arange(self.pages, out=self.free)
        self.free_count.fill_(self.pages)

    def begin(
        self, new: int, counts: Sequence[int] | torch.Tensor | None, bucket: int | None = None
    ) -> None:
        super().begin(new, counts, bucket)
        longest = self._pages_for(self.bound)
        if longest > self.table.shape[1]:
            wider = round_up(longest, self._pages_for(self.step))
            table = self.table.new_full((self.table.shape[0], wider), -1)
            table[:, : self.table.shape[1]] = self.table
            self.table = table
        # What the host does not know it has to assume: every row as long as the longest.
        lengths = [self.bound] * self.held.shape[0] if self.host is None else self.host
        needed = sum(self._pages_for(n) for n in lengths)
        if needed > self.pages:
            self._add_pages(round_up(needed, self._pages_for(self.step)) - self.pages)
        self.status.bitwise_or_(
            cache_ops.reserve_pages(*self._pool(), self.lengths, self.page_size)
        )

    def _add_pages(self, more: int) -> None:
        ids = torch.arange(
            self.pages, self.pages + more, dtype=torch.int32, device=self.free.device
        )
        self.free = torch.cat([self.free, ids])
        self.free.scatter_(0, self.free_count + torch.arange(more, device=ids.device), ids)
        self.free_count.add_(more)
        self.pages += more

    def cut(self, lengths: Sequence[int] | torch.Tensor, bound: int | None) -> None:
        super().cut(lengths, bound)
        self.status.bitwise_or_(
            cache_ops.truncate_pages(*self._pool(), self.lengths, self.page_size)
        )

    def _pool(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.table, self.held, self.free, self.free_count

    def select(self, indices: torch.Tensor) -> None:
        """Keep or permute rows, each once at most; the others' pages go back to the pool."""
        if indices.device.type == "cpu" and indices.unique().numel() != indices.numel():
            raise ValueError(
                f"rows: expected each at most once in a paged cache, given {indices.tolist()}"
            )
        kept = indices.to(self.held.device)
        left = torch.zeros_like(self.lengths).index_copy_(0, kept, self.lengths[kept])
        status = cache_ops.truncate_pages(*self._pool(), left, self.page_size)
        self.status.bitwise_or_(status)
        self.table, self.held = self.table[kept], self.held[kept]
        super().select(indices)


class PagedLayer(RollbackLayer):
    """Keys and values ``[pages, H, page_size, D]``.

    Position p of row b lies in page ``table[b, p // page_size]``.
    """

    rows: PagedRows

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.rows.pages, like.shape[1], self.rows.page_size, like.shape[3])

    def grow(self) -> None:
        if self.keys.shape[0] < self.rows.pages:
            keys, values = self._room(self.keys), self._room(self.values)
            keys[: self.keys.shape[0]] = self.keys
            values[: self.values.shape[0]] = self.values
            self._hold(keys, values)

    def reset(self) -> None:
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def select(self, indices: torch.Tensor) -> None:
        """Pages stay where they are; the table tells whose they are."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return a copy of what attention reads: ``[B, H, span, D]`` each."""
        self._begin(key_states, value_states)
        base, counts = self._local()
        table = self.rows.table.to(self.device)
        _, status = cache_ops.append_paged(
            self.keys,
            self.values,
            table,
            unit_stride(key_states),
            unit_stride(value_states),
            base,
            counts,
        )
        self._report(status)
        span, size = self.rows.span, self.rows.page_size
        pages = table[:, : -(-span // size)].clamp(min=0)
        # What is not the row's own is cleared: a page may come from another row, whose NaN would
        # spread.
        past = torch.arange(span, device=self.device) >= self.rows.lengths.to(self.device)[:, None]
        return self._gather(self.keys, pages, past), self._gather(self.values, pages, past)

    def _gather(self, pool: torch.Tensor, pages: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        batch, count = pages.shape
        _, heads, size, dim = pool.shape
        rows = pool.index_select(0, pages.reshape(-1)).view(batch, count, heads, size, dim)
        rows = rows.transpose(1, 2).reshape(batch, heads, count * size, dim)[:, :, : past.shape[1]]
        return rows.masked_fill(past[:, None, :, None], 0)
