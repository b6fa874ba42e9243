"""The operators ``sample`` and ``verify`` as functions over torch tensors.

Thin on purpose: the host checks shapes, dtypes and scalars by name (``checks.py``), then one
operator of torch's dispatcher does the work. Nothing here reads a tensor's value, so no call waits
for the device; errors in tensor values are returned in ``status`` (see
``errors.raise_for_status``).

Both work under ``torch.compile`` and have fake implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict, overload

import torch

from .. import _C, arguments
from . import checks
from .unchecked import TreeVerifyResult, VerifyResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

Real = float | torch.Tensor
Int = int | torch.Tensor
Ids = int | Sequence[int] | torch.Tensor

_sample = torch.ops.polyspec.sample.default
_verify = torch.ops.polyspec.verify.default
_verify_tree = torch.ops.polyspec.verify_tree.default


class SampleResult(NamedTuple):
    """Result of ``sample``.

    Attributes:
        tokens: [B] int64; -1 where the status has an error.
        logprobs: [B] float32, natural log of the token's probability; NaN where there is no token.
        status: [B] int32 bit set, 0 = no error.
        statistics: [B, 2] int64, opaque: the distribution of each token, for ``verify``'s
            ``draft_statistics``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor


class CutVerifyResult(NamedTuple):
    """Result of ``verify`` with ``eos`` or ``room``: ``VerifyResult`` and five more fields.

    Attributes:
        tokens: [B, K+1] int64, as in ``VerifyResult``, and -1 after a cut.
        num_accepted: [B] int64, emitted draft tokens.
        logprobs: [B, K+1] float32, NaN after a cut.
        status: [B] int32 bit set, 0 = no error; errors of rows after a cut are not reported.
        statistics: [B, K+1, 2] int64, opaque; 0 after a cut.
        num_emitted: [B] int64, emitted tokens, an EOS included.
        ended: [B] int64 bit set: 1 the last token is an EOS, 2 the room is used up; 0 the text
            continues.
        cache_lengths: [B] int64, position + num_accepted: maximum valid length of a cache that has
            read the block. One more than next_positions where the last token is a draft token with
            a row after it; a draft token at the last row has no such row, and is not counted.
        next_ids: [B] int64, the last emitted token, input of the next pass; -1: no token.
        next_positions: [B] int64, absolute position of that token; -1: no token.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor
    num_emitted: torch.Tensor
    ended: torch.Tensor
    cache_lengths: torch.Tensor
    next_ids: torch.Tensor
    next_positions: torch.Tensor


def has_cuda() -> bool:
    """Return whether this build has CUDA kernels and torch sees a device for them. Never raises."""
    return bool(_C.build_info()["cuda"]) and torch.cuda.is_available()


def sample(
    logits: torch.Tensor,
    temperature: Real = 1.0,
    top_k: Int = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    seed: Int = 0,
    position: Int = 0,
    level: int = 1,
    round: Int = 0,
    *,
    node: Int = 0,
    draws: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> SampleResult:
    """Draw one token per request from the processed distribution of its logits.

    The distribution is the softmax of ``logits / temperature``, cut by top-k, then top-p, then
    min-p, each on the ids kept by the previous filter; all ties at an edge are kept. Temperature 0
    is the argmax, lowest id on ties. Draws are Philox4x32-10 (Salmon et al., SC 2011) keyed by
    seed, position, level, round and node, so a request's token does not depend on its batch.

    Args:
        logits: [B, V] float32, bfloat16 or float16, any row stride, unit stride along V.
        temperature: in [0, 2**120]; scalar or [B], like the other parameters. Between 0 and
            2**-126 it counts as 2**-126.
        top_k: >= 0; 0 is off.
        top_p: in [0, 1]; 1 is off. The likeliest token always stays.
        min_p: in [0, 1]; 0 is off.
        seed: in [0, 2**64); a tensor has the 64 bits as int64 (or uint64).
        position: >= 0, absolute index of the drawn token.
        level: in [1, 2**16), the level that draws; 1 is the target.
        round: in [0, 2**32), counts the level's draws at a position.
        node: in [0, 2**14), distinguishes several draws at a position, as in a tree.
        draws: [B, 1] int64, 64 uniform bits each, instead of Philox.
        allowed: [B, ceil(V / 32)] int32, allowed ids: bit i % 32 of word i // 32, the layout of
            llguidance and xgrammar. A forbidden id has probability 0, as if its logit were -inf; a
            row without allowed ids has the status ``EMPTY_ROW``. None: all ids are allowed.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names the expected and actual value.
        PolyspecError: CUDA logits in a build without CUDA kernels.
    """
    batch = checks.logits("logits", logits, "[B, V]", 2)
    return SampleResult._make(
        _sample(
            logits,
            *checks.per_request(batch, temperature, top_k, top_p, min_p, seed, position, round),
            *checks.integer("node", node, batch, arguments.NODE_MAX),
            arguments.whole("level", level, arguments.LEVEL_MAX, 1),
            checks.draws(draws, batch, 1, "[B, 1]"),
            checks.allowed(allowed, batch, batch[:1], logits.shape[1], "[B, ceil(V / 32)]"),
        )
    )


class _Options(TypedDict, total=False):
    """Keyword arguments of `verify` other than ``eos`` and ``room``."""

    draft_lengths: torch.Tensor | None
    temperature: Real
    top_k: Int
    top_p: Real
    min_p: Real
    seed: Int
    position: Int
    level: int
    round: Int
    rule: str
    target_to_draft: torch.Tensor | None
    draft_statistics: torch.Tensor | None
    draft_rows: torch.Tensor | None
    slots: torch.Tensor | None
    offsets: torch.Tensor | None
    draft_len: int | None
    draws: torch.Tensor | None
    allowed: torch.Tensor | None


@overload
def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    eos: None = None,
    room: None = None,
    **options: Unpack[_Options],
) -> VerifyResult: ...


@overload
def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    eos: Ids | None = None,
    room: Int | None = None,
    **options: Unpack[_Options],
) -> CutVerifyResult: ...


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    draft_lengths: torch.Tensor | None = None,
    temperature: Real = 1.0,
    top_k: Int = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    seed: Int = 0,
    position: Int = 0,
    level: int = 1,
    round: Int = 0,
    rule: str = "token",
    target_to_draft: torch.Tensor | None = None,
    draft_statistics: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    draft_len: int | None = None,
    draws: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    eos: Ids | None = None,
    room: Int | None = None,
) -> VerifyResult | CutVerifyResult:
    """Verify draft tokens against the target's logits, and emit tokens of the target's
    distribution.

    Rule "token" accepts draft token y while u < p(y) / q(y) and draws from norm(max(p - q, 0)) at
    the first rejection (Leviathan et al. 2023, algorithm 1); rule "block" verifies the block as a
    whole (Sun et al. 2024, arXiv 2403.10444). p and q are the processed distributions, with the
    same temperature and filters. With both rules the emitted tokens have exactly the target's
    distribution.

    Args:
        target_logits: [B, K+1, V] float32, bfloat16 or float16, any row strides, unit stride along
            V. Row i is the distribution of the token after i draft tokens.
        draft_tokens: [B, K] integers, the target's ids; entries past ``draft_lengths`` are ignored.
        draft_logits: [B, K, Vd] with Vd <= V, strides as above; None is a deterministic proposal
            (q is one-hot).
        draft_lengths: [B] integers in [0, K]; None is K for every request, or with ``offsets`` the
            request's rows - 1.
        draft_rows: draft rows by index: integers shaped like ``draft_tokens``, for each token its
            row in the pool ``draft_logits`` [R, Vd], or -1 for a deterministic proposal.
            ``draft_statistics`` are then [R, 2]. Any logits with evenly spaced rows are a pool,
            such as the logits from the level below's verification, ``logits.flatten(0, 1)``.
        slots: [B] integers: each of ``temperature`` ... ``round``, ``room`` (and ``eos`` with two
            dimensions) is a scalar or has a value per slot, [S], and request i reads slots[i].
        offsets: [B+1] integers: the target's rows of all requests are concatenated,
            ``target_logits`` [N, V], request i having rows offsets[i] ... offsets[i+1]-1.
            ``draft_tokens`` (and ``draft_rows``) are [N] then, entry offsets[i]+j being draft token
            j of request i. A request with as many draft tokens as rows has no bonus row: if all
            tokens are accepted, no token is emitted after them.
        draft_len: K, the maximum draft tokens of a request, with ``offsets``; determines the shape
            of the outputs. Every layout has the same results, bit for bit. An index out of range is
            an error of its request (``BAD_INDEX``, or ``BAD_LENGTH`` for more tokens than K or
            rows).
        temperature, top_k, top_p, min_p: as in ``sample``.
        seed: as in ``sample``.
        position: absolute index of the first draft token.
        level: the verifying level; 1 is the target.
        round: counts the level's verifications.
        rule: "token" or "block".
        target_to_draft: [V] integers, draft id of each target id or -1. None with Vd < V: the same
            ids, q = 0 past Vd.
        draft_statistics: [B, K, 2] int64, the ``statistics`` of the draft rows from ``sample`` or
            ``verify`` with the same parameters, which saves a reduction. Statistics that cannot
            belong to the draft token's row are an error of the request
            (``DRAFT_STATISTICS_MISMATCH``). Statistics of another row may pass; the tokens then do
            not have the target's distribution, though none has probability 0 under it.
        draws: [B, K+1] int64, 64 uniform bits each instead of Philox: K acceptance tests, then the
            emitted token.
        allowed: [B, K+1, ceil(V / 32)] int32, or [N, ceil(V / 32)] with ``offsets``: allowed ids of
            each row of the target, as in ``sample``. Draft rows are not masked, so that a forbidden
            draft token is rejected, and ``draft_statistics`` are of unmasked rows. A row after a
            forbidden draft token is not used.
        eos: ids that end a text and are emitted: an id, several, or an integer tensor [E] or [B, E]
            on the logits' device, padded with -1. (Other ids are copied to the device.)
        room: >= 0, maximum emitted tokens; scalar or [B]. A request with room 0 is not read. With
            ``eos`` or ``room`` the emitted tokens are cut, and the result is a
            ``CutVerifyResult``; without both nothing is cut.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names the expected and actual value.
        PolyspecError: CUDA logits in a build without CUDA kernels.
    """
    layout = checks.layout(checks.BLOCK, target_logits, offsets, draft_len)
    batch, rows, vocab, shape, text, offsets = layout
    size = batch[0]
    draft_tokens = checks.table("draft_tokens", draft_tokens, batch, shape, text, torch.int64)
    if draft_rows is not None:
        draft_rows = checks.table("draft_rows", draft_rows, batch, shape, text, torch.int64)
    draft_statistics, target_to_draft = checks.drafted(
        draft_logits,
        draft_statistics,
        target_to_draft,
        batch,
        vocab,
        (size, rows - 1) if draft_rows is None else None,
    )
    if draft_lengths is not None:
        draft_lengths = checks.table(
            "draft_lengths", draft_lengths, batch, (size,), "[B]", torch.int64
        )
    slots, holders = checks.holders(
        slots, batch, temperature, top_k, top_p, min_p, seed, position, round, room
    )
    cuts = eos is not None or room is not None
    *outputs, ends = _verify(
        target_logits,
        draft_tokens,
        offsets,
        rows - 1,
        draft_logits,
        draft_lengths,
        draft_rows,
        draft_statistics,
        target_to_draft,
        *checks.per_request(holders, temperature, top_k, top_p, min_p, seed, position, round),
        arguments.whole("level", level, arguments.LEVEL_MAX, 1),
        arguments.rule(rule),
        checks.draws(draws, batch, rows, "[B, K+1]"),
        slots,
        holders[0],
        None if eos is None else checks.ids("eos", eos, holders),
        *checks.integer("room", arguments.INT64_MAX if room is None else room, holders),
        checks.allowed(allowed, batch, target_logits.shape[:-1], vocab, "[B, K+1, ceil(V / 32)]"),
    )
    return CutVerifyResult(*outputs, *ends.unbind(0)) if cuts else VerifyResult._make(outputs)


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
    if offsets is not None and counts is not None:
        raise ValueError("counts: expected None with offsets, given a tensor")
    layout = checks.layout(checks.TREE, target_logits, offsets, nodes)
    batch, rows, vocab, shape, text, offsets = layout
    if rows > arguments.NODE_MAX + 1:
        raise ValueError(f"target_logits: expected N+1 rows, N < 2**14, given N = {rows - 1}")
    size, ints = batch[0], torch.int64
    draft_tokens = checks.table("draft_tokens", draft_tokens, batch, shape, text, ints)
    parents = checks.table("parents", parents, batch, shape, text, ints)
    if counts is not None:
        counts = checks.table("counts", counts, batch, (size,), "[B]", ints)
    most, _ = checks.integer("depth", rows - 1 if depth is None else depth, batch, rows - 1)
    if (draft_logits is None) != (draft_rows is None):
        name = "draft_rows" if draft_logits is None else "draft_logits"
        raise ValueError(f"draft_logits, draft_rows: expected both or none, given {name} only")
    if draft_rows is not None:
        by_row, form = ((size, rows), "[B, N+1]") if offsets is None else (shape, text)
        draft_rows = checks.table("draft_rows", draft_rows, batch, by_row, form, ints)
    draft_statistics, target_to_draft = checks.drafted(
        draft_logits, draft_statistics, target_to_draft, batch, vocab, None
    )
    slots, holders = checks.holders(
        slots, batch, temperature, top_k, top_p, min_p, seed, position, round, room
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
        *checks.per_request(holders, temperature, top_k, top_p, min_p, seed, position, round),
        arguments.whole("level", level, arguments.LEVEL_MAX, 1),
        arguments.rule(rule),
        checks.draws(draws, batch, rows + most, "[B, N+D+1]"),
        slots,
        holders[0],
        None if eos is None else checks.ids("eos", eos, holders),
        *checks.integer("room", arguments.INT64_MAX if room is None else room, holders),
        checks.allowed(allowed, batch, target_logits.shape[:-1], vocab, "[B, N+1, ceil(V / 32)]"),
    )
    return TreeVerifyResult(
        tokens, accepted, path, path_rows, logprobs, status, statistics, *ends.unbind(0)
    )
