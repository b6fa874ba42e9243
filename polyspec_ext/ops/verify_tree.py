"""The operator ``verify_tree`` as a function over torch tensors, thin as ``verify_sample.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyspec_ext import arguments as _arguments
from polyspec_ext import validate as _checks

from . import values
from .verify_sample import Ids, Int, Real, requests_of, results_of, statistics_of

_verify_tree = torch.ops.polyspec.verify_tree.default


class TreeVerifyResult(NamedTuple):
    """What ``verify_tree`` returns.

    Attributes:
        tokens: [B, D+1] int64, the accepted path's tokens, then correction or bonus, then -1.
        num_accepted: [B] int64, nodes of the path.
        path: [B, D] int64, the nodes, then -1.
        rows: [B, D+1] int64, the row of ``target_logits`` that each token was drawn from: 0, or a
            node + 1; then -1.
        logprobs: [B, D+1] float32, log p of each emitted token under the processed target
            distribution; NaN past them.
        status: [B] int32 bit set, 0 = fine.
        statistics: [B, D+1, 2] int64, opaque: target distribution of each emitted token, for the
            level above.
        num_emitted, ended, cache_lengths, next_ids, next_positions: [B] int64 each, as in
            ``CutVerifyResult``.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    path: torch.Tensor
    rows: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor
    num_emitted: torch.Tensor
    ended: torch.Tensor
    cache_lengths: torch.Tensor
    next_ids: torch.Tensor
    next_positions: torch.Tensor


def verify_tree(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    depth: int | None = None,
    draft_rows: torch.Tensor | None = None,
    draft_statistics: torch.Tensor | None = None,
    target_to_draft: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
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
    draws: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    eos: Ids | None = None,
    room: Int | None = None,
    validate: bool = False,
) -> TreeVerifyResult:
    """Verify a tree of draft tokens against the target's logits, and emit the accepted path and a
    token.

    The walk begins at the root and goes on while a child stands. Deterministic children (EAGLE-2's
    top-k): a token is drawn from the target's distribution, and the walk goes on if it is a
    child's; the same as accepting child x with p(x), else zeroing p(x) and renormalising. Children
    drawn independently from one draft distribution, with replacement: the recursive residual (Yang
    et al. 2024, arXiv 2401.06706). Temperature 0 follows the argmax. Either way the emitted tokens
    have exactly the target's distribution. A chain (parents i-1) with draft rows gets the tokens
    that ``verify`` gives it by the same rule.

    Rule "block" verifies drawn children from the leaves to the root, siblings with a high p/q
    first: more tokens are accepted of several paths drawn from one model. Paths that begin alike
    share the nodes of that beginning. A sibling that was drawn again is a node too, without
    children: what is drawn behind it hangs from the first of its equals. The children of a parent
    are in the order drawn.

    Args:
        target_logits: [B, N+1, V] float32, bfloat16 or float16, any row strides, unit stride along
            V, N < 2**14. Row 0 is the distribution behind the root, row i+1 the one behind node i.
        draft_tokens: [B, N] integers, the target's ids.
        parents: [B, N] integers: the parent's node, smaller than the node, or -1 for a child of the
            root. The children of a parent are tried in the order of their nodes.
        draft_logits: the pool [R, Vd] that draft rows lie in; None: all children are deterministic.
        counts: [B] integers in [0, N]; None is N nodes for every request.
        depth: D, the most nodes of a path; None is N.
        draft_rows: [B, N+1] integers: the pool's row that the children behind each row of the
            target were drawn from; -1: they are deterministic. Needed with ``draft_logits``.
        draft_statistics: [R, 2] int64, as for ``verify``.
        target_to_draft: [V] integers, draft id of each target id or -1.
        slots: [B] integers, as for ``verify``: parameters lie at them, [S].
        offsets: [B+1] integers: the target's rows of all requests follow one another,
            ``target_logits`` [M, V], request i having rows offsets[i] ... offsets[i+1]-1: one more
            than nodes. ``draft_tokens``, ``parents`` (and ``draft_rows``) are [M] then: entry
            offsets[i]+j is node j (row j) of request i, whose last entry is no node. ``counts`` is
            None. Any arrangement gives the same results, bit for bit.
        nodes: N, the most nodes of a request, with ``offsets``.
        temperature, top_k, top_p, min_p, seed, position, level, round: as for ``verify``;
            ``position`` is that of the tree's first nodes.
        rule: "token" or "block", of drawn children; deterministic ones come to the same under both.
            By "block" a path has at most 32 drawn nodes one behind the other.
        draws: [B, N+D+1] int64, 64 uniform bits each in place of Philox: the test of each node,
            then the token drawn at each depth.
        allowed: [B, N+1, ceil(V / 32)] int32, or [M, ceil(V / 32)] with ``offsets``: allowed ids of
            each row of the target, as for ``verify``.
        eos, room: where texts end, as for ``verify``.
        validate: look for mistakes that only values show, as for ``verify``.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names expected and given.
        PolyspecError: CUDA logits in a build without CUDA kernels.

    What is no tree (a parent that does not come before its node, equal deterministic siblings, a
    path longer than D) is an error of its request (``BAD_TREE``), a draft row, slot or offset out
    of range too (``BAD_INDEX``), and more nodes than N (``BAD_LENGTH``).
    """
    if offsets is not None and counts is not None:
        raise ValueError("counts: expected None with offsets, given a tensor")
    layout = _checks.layout(_checks.TREE, target_logits, offsets, nodes)
    place, rows, vocab, shape, text, offsets = layout
    if rows > _checks.NODE_MAX + 1:
        raise ValueError(f"target_logits: expected N+1 rows, N < 2**14, given N = {rows - 1}")
    batch, ints = place[0], torch.int64
    draft_tokens = _checks.table("draft_tokens", draft_tokens, place, shape, text, ints)
    parents = _checks.table("parents", parents, place, shape, text, ints)
    if counts is not None:
        counts = _checks.table("counts", counts, place, (batch,), "[B]", ints)
    most, _ = _checks.integer("depth", rows - 1 if depth is None else depth, place, rows - 1)
    if (draft_logits is None) != (draft_rows is None):
        given = "draft_rows" if draft_logits is None else "draft_logits"
        raise ValueError(f"draft_logits, draft_rows: expected both or none, given {given} only")
    if draft_rows is not None:
        by_row, form = ((batch, rows), "[B, N+1]") if offsets is None else (shape, text)
        draft_rows = _checks.table("draft_rows", draft_rows, place, by_row, form, ints)
    draft_statistics, target_to_draft = _checks.drafted(
        draft_logits, draft_statistics, target_to_draft, place, vocab, None
    )
    slots, held = _checks.holders(
        slots, place, temperature, top_k, top_p, min_p, seed, position, round, room
    )
    if validate is not False and _arguments.flag("validate", validate):
        values.check_logits("target_logits", target_logits)
        values.check_logits("draft_logits", draft_logits)
        if draft_logits is not None and draft_rows is not None and draft_statistics is not None:
            request, row = values.rows_of_nodes(
                batch, rows - 1, draft_rows, parents, counts, offsets, place[1]
            )
            parameters = (temperature, top_k, top_p, min_p)
            values.check_draft_statistics(
                draft_logits, draft_statistics, request, row, slots, parameters, statistics_of
            )
    tokens, accepted, logprobs, status, statistics, path, path_rows, ends = _verify_tree(
        target_logits,
        draft_tokens,
        parents,
        offsets,
        rows - 1,
        most,
        counts,
        draft_logits,
        draft_rows,
        draft_statistics,
        target_to_draft,
        *_checks.per_request(held, temperature, top_k, top_p, min_p, seed, position, round),
        _checks.level(level),
        _checks.rule(rule),
        _checks.draws(draws, place, rows + most, "[B, N+D+1]"),
        slots,
        held[0],
        None if eos is None else _checks.ids("eos", eos, held),
        *_checks.integer("room", _checks.INT64_MAX if room is None else room, held),
        _checks.allowed(allowed, place, target_logits.shape[:-1], vocab, "[B, N+1, ceil(V / 32)]"),
    )
    return TreeVerifyResult(
        tokens, accepted, path, path_rows, logprobs, status, statistics, *ends.unbind(0)
    )


def _verify_tree_fake(
    target_logits: torch.Tensor,
    draft_tokens: object,
    parents: object,
    offsets: torch.Tensor | None,
    nodes: int,
    depth: int,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    batch = requests_of(target_logits, offsets)
    *emitted, ends = results_of(target_logits, batch, depth + 1)
    tokens = emitted[0]
    return (*emitted, tokens.new_empty(batch, depth), torch.empty_like(tokens), ends)


torch.library.register_fake("polyspec::verify_tree", _verify_tree_fake)
