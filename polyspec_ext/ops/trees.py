"""Operators over trees of tokens: their verification, positions and masks, and the move of an
accepted path in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import register_fake as register_torch_fake

from .. import arguments
from .verification import (
    Ids,
    Int,
    Real,
    cuts,
    empty_results,
    parameters_of,
    register_fake,
    typed,
)

_verify_tree: Callable[..., tuple[Tensor, ...]] = torch.ops.polyspec.verify_tree.default

# ---- verification --------------------------------------------------------------------------------


class TreeVerifyResult(NamedTuple):
    """Result of ``verify_tree``.

    Attributes:
        tokens, logprobs, status, statistics: as in ``VerifyResult``, D for K.
        num_accepted: [B] int64, nodes of the accepted path.
        path: [B, D] int64, the nodes of the path, then -1.
        rows: [B, D+1] int64, the row of ``target_logits`` of each token: 0, or a node + 1; then -1.
        num_emitted, ended, cache_lengths, next_ids, next_positions: [B] int64 each, as in
            ``CutVerifyResult``.
    """

    tokens: Tensor
    num_accepted: Tensor
    path: Tensor
    rows: Tensor
    logprobs: Tensor
    status: Tensor
    statistics: Tensor
    num_emitted: Tensor
    ended: Tensor
    cache_lengths: Tensor
    next_ids: Tensor
    next_positions: Tensor


def verify_tree(
    target_logits: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    depth: int | None = None,
    draft_rows: Tensor | None = None,
    draft_statistics: Tensor | None = None,
    target_to_draft: Tensor | None = None,
    slots: Tensor | None = None,
    offsets: Tensor | None = None,
    nodes: int | None = None,
    temperature: Real = 1.0,
    top_k: Int = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    seed: Int = 0,
    position: Int = 0,
    level: int = 1,
    round: Int = 0,
    rule: str = "token",
    draws: Tensor | None = None,
    allowed: Tensor | None = None,
    eos: Ids | None = None,
    room: Int | None = None,
) -> TreeVerifyResult:
    """Verify a tree of draft tokens against the target's logits, and emit the accepted path and a
    token.

    The walk begins at the root and continues while a child is accepted. Deterministic children
    (EAGLE-2's top-k): a token is drawn from the target's distribution, and the walk continues if a
    child has the token; the same as accepting child x with p(x), else zeroing p(x) and
    renormalising. Children drawn independently from one draft distribution, with replacement: the
    recursive residual (Yang et al. 2024, arXiv 2401.06706). Temperature 0 follows the argmax. In
    all cases the emitted tokens have exactly the target's distribution. A chain (parents i-1) with
    draft rows has the tokens of ``verify`` with the same rule.

    Rule "block" verifies drawn children from the leaves to the root, siblings with a high p/q
    first: more tokens are accepted of several paths drawn from one model. Paths with a common
    prefix share its nodes. A sibling drawn again is a node too, without children: draws after it
    are children of the first equal sibling. The children of a parent are in the order of the draws.

    Args:
        target_logits: [B, N+1, V] float32, bfloat16 or float16, any row strides, unit stride along
            V, N < 2**14. Row 0 is the distribution after the root, row i+1 after node i.
        draft_tokens: [B, N] integers, the target's ids.
        parents: [B, N] integers: the parent's node, smaller than the node, or -1 for a child of the
            root. The children of a parent are tried in the order of their nodes.
        draft_logits: the pool [R, Vd] of draft rows; None: all children are deterministic.
        counts: [B] integers in [0, N]; None is N nodes for every request.
        depth: D, the maximum nodes of a path; None is N.
        draft_rows: [B, N+1] integers: the pool's row from which the children after each row of the
            target were drawn; -1: deterministic children. Required with ``draft_logits``.
        draft_statistics: [R, 2] int64, as for ``verify``.
        target_to_draft: [V] integers, draft id of each target id or -1.
        slots: [B] integers, as for ``verify``: index of each request's parameters, [S].
        offsets: [B+1] integers: the target's rows of all requests are concatenated,
            ``target_logits`` [M, V], request i having rows offsets[i] ... offsets[i+1]-1: one more
            than nodes. ``draft_tokens``, ``parents`` (and ``draft_rows``) are [M] then: entry
            offsets[i]+j is node j (row j) of request i; the last entry is no node. ``counts`` is
            None. Every layout has the same results, bit for bit.
        nodes: N, the maximum nodes of a request, with ``offsets``.
        temperature, top_k, top_p, min_p, seed, position, level, round: as for ``verify``;
            ``position`` is that of the tree's first nodes.
        rule: "token" or "block", of drawn children; the rules agree for deterministic children. By
            "block" a path has at most 32 consecutive drawn nodes.
        draws: [B, N+D+1] int64, 64 uniform bits each instead of Philox: the test of each node, then
            the token drawn at each depth.
        allowed: [B, N+1, ceil(V / 32)] int32, or [M, ceil(V / 32)] with ``offsets``: allowed ids of
            each row of the target, as for ``verify``.
        eos, room: the ends of texts, as for ``verify``.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names the expected and actual value.
        PolyspecError: CUDA logits in a build without CUDA kernels.

    An invalid tree (a parent that does not come before its node, equal deterministic siblings, a
    path longer than D) is an error of its request (``BAD_TREE``), as are a draft row, slot or
    offset out of range (``BAD_INDEX``), and more nodes than N (``BAD_LENGTH``).
    """
    try:
        tokens, accepted, logprobs, status, statistics, path, path_rows, ends = _verify_tree(
            target_logits,
            draft_tokens,
            parents,
            offsets,
            nodes,
            depth,
            counts,
            draft_logits,
            draft_rows,
            draft_statistics,
            target_to_draft,
            *parameters_of(level, temperature, top_k, top_p, min_p, seed, position, round),
            arguments.rule(rule),
            draws,
            slots,
            *cuts(eos, room, target_logits),
            allowed,
        )
    except RuntimeError as error:
        raise typed(error, "target_logits", target_logits) from None
    return TreeVerifyResult(
        tokens, accepted, path, path_rows, logprobs, status, statistics, *ends.unbind(0)
    )


def _verified_tree(
    logits: Tensor, tokens: object, parents: object, offsets: Any, most: Any, depth: Any, *_: object
) -> tuple[Tensor, ...]:
    most = logits.shape[1] - 1 if offsets is None else most
    depth = most if depth is None else depth
    batch = len(logits) if offsets is None else len(offsets) - 1
    *emitted, ends = empty_results(logits, batch, depth + 1)
    tokens = emitted[0]
    return (*emitted, tokens.new_empty(batch, depth), torch.empty_like(tokens), ends)


register_fake("verify_tree", _verified_tree)

# ---- positions and masks -------------------------------------------------------------------------


def tree_positions(
    parents: Any, tokens: int, depth: int | None, base: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the position of each new node of trees, ``[B, T]`` int64, and their `ancestors`.

    Args:
        parents: [B, M] or [M] integers, M >= T, as of `RollbackCache.inputs`.
        tokens: T, the new nodes, the last of each tree.
        depth: as of `ancestors`.
        base: [B] int64, cached tokens, the earlier nodes included.
        counts: [B] int64, new nodes of each row; None: T.
    """
    batch = len(base)
    if not isinstance(parents, Tensor) or parents.dtype not in arguments.INT_DTYPES:
        raise TypeError(f"parents: expected an integer tensor, given {arguments.shown(parents)}")
    *rows, nodes = parents.shape or (0,)
    if nodes < tokens or rows not in ([], [batch]):
        raise ValueError(
            f"parents: expected shape [{tokens}] or [{batch}, {tokens}], or more nodes, given "
            f"{list(parents.shape)}"
        )
    tree = ancestors(parents.expand(batch, nodes).to(base.device), depth)
    before = nodes - tokens  # nodes of earlier passes
    positions = base[:, None] - before + tree[:, before:].sum(-1) - 1
    if counts is not None:
        # Padding repeats the last position before the pass: a tree has more nodes than a path has
        # positions.
        inside = torch.arange(tokens, device=positions.device) < counts[:, None]
        positions = torch.where(inside, positions, (base - 1).clamp_min(0)[:, None])
    return positions, tree


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
    base: Tensor | int, tree: Tensor, capacity: int, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Return the slots that each node of a tree sees: the tokens before the tree, its ancestors
    and itself. ``[B, T, N]`` bool.

    Args:
        base: [B] int64, tokens before the tree, or an int for all rows; node i is in slot
            ``base[b] + i``.
        tree: [B, T, M] bool (`ancestors`), T of the M nodes in the cache; T < M only without a
            window.
        window: a node sees the `window` latest tokens of its path, itself included, and the
            `sinks` first slots; None: all."""
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
        seen = seen & ((behind[:, None, :] > depth[..., None] - window) | (slots < sinks))
    return seen


# ---- accepted paths in a cache -------------------------------------------------------------------


def pointers(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the addresses of the layers' keys and values: [2, L] int64 on their device, for
    `compact_tree`.

    Call it again when a layer's storage changes. It copies a few numbers to the device;
    `compact_tree` itself does not.
    """
    bases = [[tensor.data_ptr() for tensor in keys], [tensor.data_ptr() for tensor in values]]
    return torch.tensor(bases, dtype=torch.int64).to(keys[0].device, non_blocking=True)


compact_tree: Callable[..., tuple[Tensor, Tensor]] = torch.ops.polyspec.compact_tree.default
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


def _compacted(*arguments: Any) -> tuple[Tensor, Tensor]:
    lengths = arguments[3]
    return torch.empty_like(lengths), torch.empty_like(lengths, dtype=torch.int32)


register_torch_fake("polyspec::compact_tree", _compacted)


def layers_alike(layers: Sequence[Any], known: dict[tuple[int, ...], Tensor]) -> list[Any]:
    """Group allocated layers of a `RollbackCache` that share a launch of `compact_tree`, usually
    all: keys, values and `pointers` of each group. Captured graphs read the pointers, so that
    memory that is used again has the same tensor: `known`, by address."""
    forms: dict[Any, list[Any]] = {}
    for layer in layers:
        if layer.is_initialized:
            form = [(x.shape, x.stride(), x.device) for x in (layer.keys, layer.values)]
            forms.setdefault(tuple(form), []).append(layer)
    groups = []
    for alike in forms.values():
        keys, values = [layer.keys for layer in alike], [layer.values for layer in alike]
        bases = tuple(tensor.data_ptr() for tensor in (*keys, *values))
        if bases not in known:
            if len(known) >= len(layers):  # entries of freed memory
                known.clear()
            known[bases] = pointers(keys, values)
        groups.append((keys, values, known[bases]))
    return groups
