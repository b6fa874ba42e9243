"""The operators on caches of keys and values as functions over torch tensors
(polyspec/kv_cache.hpp).

Thin on purpose: shapes, dtypes and devices are checked where the pointers are taken, errors in
tensor values are returned as status bits, and nothing waits for the device. Caches are written in
place. All work under ``torch.compile`` and in CUDA graphs.

A rollback of a contiguous cache needs no operator: it changes the lengths only (contract C7).
The operators of paged caches have no functions here: ``torch.ops.polyspec.append_paged``,
``reserve_pages`` and ``truncate_pages``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Appended = tuple[Tensor, Tensor]
_append: Callable[..., Appended] = torch.ops.polyspec.append.default


class CacheStatus(enum.IntFlag):
    """Status bits of the cache operators (polyspec/kv_cache.hpp); a row with a bit is unchanged."""

    BAD_LENGTH = 1 << 5
    BAD_PATH = 1 << 10
    CACHE_FULL = 1 << 11
    BAD_PAGE = 1 << 12


def append(
    cache_keys: Tensor,
    cache_values: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    *,
    ring: bool = False,
    sinks: int = 0,
) -> Appended:
    """Append new keys and values at each row's length, in place.

    Args:
        cache_keys, cache_values: [B, H, C, Dk] and [B, H, C, Dv], elements of 1, 2 or 4 bytes, any
            strides but unit stride along the last dimension. Written.
        keys, values: [B, H, T, Dk] and [B, H, T, Dv], strides likewise; the cache's dtype.
        lengths: [B] int64, cached lengths: token i of row b goes to position ``lengths[b] + i``.
        counts: [B] int64 in [0, T], new tokens of each row; None: T each.
        ring: positions past the first `sinks` wrap: position p is written to slot ``sinks + (p -
            sinks) % (C - sinks)``, over older tokens (sliding windows; with sinks, StreamingLLM,
            arXiv 2309.17453).
        sinks: first positions, which keep their slots.

    Returns:
        new_lengths [B] int64, and status [B] int32 (`CacheStatus`): CACHE_FULL where a row's tokens
        do not fit, BAD_LENGTH for a negative length or a count out of range. A row with a status
        bit is not written.
    """
    return _append(cache_keys, cache_values, keys, values, lengths, counts, ring, sinks)


def pointers(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the addresses of the layers' keys and values: [2, L] int64 on their device, for
    `compact_tree`.

    Call it again when a layer's storage changes. It copies a few numbers to the device;
    `compact_tree` itself does not.
    """
    bases = [[tensor.data_ptr() for tensor in keys], [tensor.data_ptr() for tensor in values]]
    return torch.tensor(bases, dtype=torch.int64).to(keys[0].device, non_blocking=True)


compact_tree: Callable[..., Appended] = torch.ops.polyspec.compact_tree.default
"""Move a tree's accepted path to the front, in place, for all layers in one launch.

Node i of row b lies in slot ``lengths[b] + i``; node ``path[b, j]`` moves to slot ``lengths[b]
+ j``.

Args:
    keys, values: L tensors [B, H, C, Dk] and [B, H, C, Dv], the same strides in every layer.
        Written.
    pointers: [2, L] int64 from `pointers`.
    lengths: [B] int64, committed tokens in front of the tree.
    path: [B, M] int64, accepted nodes in strictly increasing order, then -1.

Returns:
    new_lengths [B] int64, lengths + accepted nodes, and status [B] int32: BAD_PATH where the
    path does not increase or leaves the cache; nothing is moved in that row.
"""


# Results of the operators are like `lengths`, argument number `index`.
def _register(name: str, index: int) -> None:
    def fake(*arguments: Any) -> Appended:
        lengths = arguments[index]
        return torch.empty_like(lengths), torch.empty_like(lengths, dtype=torch.int32)

    torch.library.register_fake(f"polyspec::{name}", fake)


for _name, _index in (("append", 4), ("append_paged", 5), ("compact_tree", 3)):
    _register(_name, _index)


for _name in ("reserve_pages", "truncate_pages"):
    torch.library.register_fake(f"polyspec::{_name}", lambda pages, *_: pages.new_empty(len(pages)))
