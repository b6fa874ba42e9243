"""Attention masks and positions for batches whose rows have different lengths.

Everything is computed on the device from the lengths, so no call waits for it. Masks are additive,
``[B, 1, T, N]`` in the model's dtype, 0 where query i of row b sees slot n and the dtype's lowest
value elsewhere. `transformers` passes a 4-D mask unchanged to eager and sdpa attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def ring_positions(ends: Tensor, capacity: int, sinks: int) -> Tensor:
    """Return the position in each slot of a ring after positions ``[0, ends[b])`` are written,
    ``[B, capacity]``; -1: empty.

    Args:
        ends: [B] int64.
        capacity: slots, including `sinks` slots before the ring.
    """
    slots = torch.arange(capacity, device=ends.device)
    last = ends[:, None] - 1
    # The highest written position that maps to the slot; below `sinks` in a slot not yet written.
    held = last - torch.remainder(last - slots, capacity - sinks)
    held = torch.where(held >= sinks, held, -1)
    if sinks == 0:
        return held
    return torch.where(slots < sinks, torch.where(slots <= last, slots, -1), held)


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


def ancestors(parents: Tensor, depth: int | None = None) -> Tensor:
    """Return the nodes on the path from the root to each node, itself included, ``[B, T, T]`` bool:
    [b, i, j] is True if node j is i or an ancestor of i.

    Args:
        parents: [B, T] int64, each node's parent, less than the node's index; -1: the root.
        depth: maximum nodes of a relevant path; None: T.
    """
    batch, nodes = parents.shape
    # The root as an additional node, whose parent is itself.
    above = F.pad(torch.where(parents < 0, nodes, parents.clamp(max=nodes)), (0, 1), value=nodes)
    path = [torch.arange(nodes, device=parents.device).expand(batch, -1)]
    for _ in range(1, nodes if depth is None else min(depth, nodes)):
        path.append(above.gather(1, path[-1]))
    seen = torch.zeros(batch, nodes, nodes + 1, dtype=torch.bool, device=parents.device)
    return seen.scatter_(2, torch.stack(path, 2), True)[..., :nodes]


def tree_slots(
    base: Tensor | int, tree: Tensor, capacity: int, window: int | None = None
) -> Tensor:
    """Return the slots that each node of a tree sees: the tokens before the tree, its ancestors
    and itself. ``[B, T, N]`` bool.

    Args:
        base: [B] int64, tokens before the tree, or an int for all rows; node i is in slot
            ``base[b] + i``.
        tree: [B, T, M] bool (`ancestors`), T of the M nodes in the cache; T < M only without a
            window.
        window: a node sees the `window` latest tokens of its path, itself included; None: all."""
    count, nodes = tree.shape[1:]
    if isinstance(base, int):
        if base + nodes == capacity and window is None:
            return F.pad(tree, (base, 0), value=True)
        base = torch.full((len(tree),), base, device=tree.device)
    slots = torch.arange(capacity, device=base.device)
    node = slots[None, :] - base[:, None]
    inside = (node >= 0) & (node < nodes)
    index = node.clamp(0, nodes - 1)
    on_path = tree.gather(2, index[:, None, :].expand(-1, count, -1)) & inside[:, None, :]
    seen = on_path | (node < 0)[:, None, :]
    if window is not None:
        # Distances along the path to a node, not in slots.
        depth = tree.sum(-1) - 1
        behind = torch.where(inside, depth.gather(1, index), node)
        seen = seen & (behind[:, None, :] > depth[..., None] - window)
    return seen


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[B, T, N]`` bool as an additive mask of the scores, ``[B, 1, T, N]``."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, hidden
    )[:, None]
