"""The operators ``sample`` and ``verify`` as functions over torch tensors.

Thin on purpose: what the host can know about the arguments is checked and named (``validate.py``),
then one operator of torch's dispatcher does the work. Nothing here reads a tensor's value, so no
call waits for the device; what only the data can tell comes back in ``status`` (see
``errors.raise_for_status``).

Both work under ``torch.compile`` and have fake implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict, overload

import torch

from polyspec_ext import _C
from polyspec_ext import arguments as _arguments
from polyspec_ext import validate as _checks

from . import values

if TYPE_CHECKING:
    from typing_extensions import Unpack

Real = float | torch.Tensor
Int = int | torch.Tensor
Ids = int | Sequence[int] | torch.Tensor

_sample = torch.ops.polyspec.sample.default
_verify = torch.ops.polyspec.verify.default


class SampleResult(NamedTuple):
    """What ``sample`` returns.

    Attributes:
        tokens: [B] int64; -1 where the status has an error.
        logprobs: [B] float32, natural log of the token's probability; NaN where there is no token.
        status: [B] int32 bit set, 0 = fine.
        statistics: [B, 2] int64, opaque: the distribution behind each token, for ``verify``'s
            ``draft_statistics``.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor


class VerifyResult(NamedTuple):
    """What ``verify`` returns.

    Attributes:
        tokens: [B, K+1] int64, accepted prefix, then correction or bonus, then -1.
        num_accepted: [B] int64, draft tokens accepted.
        logprobs: [B, K+1] float32, log p of each emitted token under the processed target
            distribution; NaN past them.
        status: [B] int32 bit set, 0 = fine.
        statistics: [B, K+1, 2] int64, opaque: target distribution of each emitted token, for the
            level above.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor


class CutVerifyResult(NamedTuple):
    """What ``verify`` returns when it is told where texts end: ``VerifyResult`` and five more.

    Attributes:
        tokens: [B, K+1] int64, as in ``VerifyResult``, and -1 behind a cut.
        num_accepted: [B] int64, draft tokens among the emitted.
        logprobs: [B, K+1] float32, NaN behind a cut.
        status: [B] int32 bit set, 0 = fine; a row behind a cut is not reported.
        statistics: [B, K+1, 2] int64, opaque; 0 behind a cut.
        num_emitted: [B] int64, tokens emitted, an EOS included.
        ended: [B] int64 bit set: 1 the last token is an EOS, 2 the room is used up; 0 the text
            goes on.
        cache_lengths: [B] int64, position + num_accepted: what a cache that has read the block may
            keep. One more than next_positions where the last token is a draft token with a row
            behind it; a draft token at the last row has none, and is not counted.
        next_ids: [B] int64, the last emitted token, input of the next pass; -1 if there is none.
        next_positions: [B] int64, its absolute position; -1 if there is none.
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
    validate: bool = False,
) -> SampleResult:
    """Draw one token per request from the processed distribution of its logits.

    The distribution is the softmax of ``logits / temperature``, cut by top-k, then top-p, then
    min-p, each on what the last kept, ties at an edge all kept. Temperature 0 is the argmax, lowest
    id on ties. Draws are Philox4x32-10 (Salmon et al., SC 2011) keyed by seed, position, level,
    round and node, so a request's token does not depend on the batch around it.

    Args:
        logits: [B, V] float32, bfloat16 or float16, any row stride, unit stride along V.
        temperature: in [0, 2**120]; scalar or [B], like the rest. Between 0 and 2**-126 it counts
            as 2**-126.
        top_k: >= 0; 0 is off.
        top_p: in [0, 1]; 1 is off. The likeliest token always stays.
        min_p: in [0, 1]; 0 is off.
        seed: in [0, 2**64); a tensor holds the 64 bits as int64 (or uint64).
        position: >= 0, absolute index of the token that is drawn.
        level: in [1, 2**16), the level that draws; 1 is the target.
        round: in [0, 2**32), counts the level's draws at a position.
        node: in [0, 2**14), tells several draws for one position apart, such as those of a tree.
        draws: [B, 1] int64, 64 uniform bits each, in place of Philox.
        allowed: [B, ceil(V / 32)] int32, allowed ids: bit i % 32 of word i // 32, as llguidance and
            xgrammar write it. A forbidden id has probability 0, as if its logit were -inf; a row
            that allows nothing has the status ``EMPTY_ROW``. None: all are allowed.
        validate: raise where the logits are probabilities. It reads them on the host, so it waits
            for the device and is not for graphs or ``torch.compile``.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names expected and given.
        PolyspecError: CUDA logits in a build without CUDA kernels.
    """
    place = _checks.logits("logits", logits, "[B, V]", 2)
    if validate is not False and _arguments.flag("validate", validate):
        values.check_logits("logits", logits)
    return SampleResult._make(
        _sample(
            logits,
            *_checks.per_request(place, temperature, top_k, top_p, min_p, seed, position, round),
            *_checks.integer("node", node, place, _checks.NODE_MAX),
            _checks.level(level),
            _checks.draws(draws, place, 1, "[B, 1]"),
            _checks.allowed(allowed, place, place[:1], logits.shape[1], "[B, ceil(V / 32)]"),
        )
    )


class _Options(TypedDict, total=False):
    """What `verify` takes whether or not it is told where texts end."""

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
    validate: bool


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
    validate: bool = False,
) -> VerifyResult | CutVerifyResult:
    """Verify draft tokens against the target's logits, and emit tokens of the target's
    distribution.

    Rule "token" accepts draft token y while u < p(y) / q(y) and draws from norm(max(p - q, 0)) at
    the first rejection (Leviathan et al. 2023, algorithm 1); rule "block" verifies the block as a
    whole (Sun et al. 2024, arXiv 2403.10444). p and q are the processed distributions: the same
    temperature and filters are applied to both sides here. Either way the emitted tokens have
    exactly the target's distribution.

    Args:
        target_logits: [B, K+1, V] float32, bfloat16 or float16, any row strides, unit stride along
            V. Row i is the distribution of the token after i draft tokens.
        draft_tokens: [B, K] integers, the target's ids; entries past ``draft_lengths`` are ignored.
        draft_logits: [B, K, Vd] with Vd <= V, strides as above; None is a deterministic proposal
            (q is one-hot).
        draft_lengths: [B] integers in [0, K]; None is K for every request, or with ``offsets``
            one less than its rows.
        draft_rows: draft rows by index instead of side by side: integers shaped as
            ``draft_tokens``, for each token the row of the pool ``draft_logits`` [R, Vd] that it
            was drawn from, or -1 where its proposal was deterministic. ``draft_statistics`` are
            then [R, 2]. Any logits whose rows are evenly spaced are a pool, such as those that the
            level below has verified with, ``logits.flatten(0, 1)``.
        slots: [B] integers: each of ``temperature`` ... ``round``, ``room`` (and ``eos`` with two
            dimensions) is a scalar or has a value per slot, [S], and request i reads slots[i].
        offsets: [B+1] integers: the target's rows of all requests follow one another,
            ``target_logits`` [N, V], request i having rows offsets[i] ... offsets[i+1]-1.
            ``draft_tokens`` (and ``draft_rows``) are [N] then, entry offsets[i]+j being draft token
            j of request i. A request of as many draft tokens as rows has no bonus row: if all are
            accepted, nothing is emitted behind them.
        draft_len: K, the most draft tokens of a request, with ``offsets``; gives the outputs their
            shape. Any arrangement gives the same results, bit for bit. An index out of range is an
            error of its request (``BAD_INDEX``, or ``BAD_LENGTH`` for more tokens than K or
            rows).
        temperature, top_k, top_p, min_p: as in ``sample``.
        seed: as in ``sample``.
        position: absolute index of the first draft token.
        level: level that verifies; 1 is the target.
        round: counts the level's verifications.
        rule: "token" or "block".
        target_to_draft: [V] integers, draft id of each target id or -1. None with Vd < V: the same
            ids, q = 0 past Vd.
        draft_statistics: [B, K, 2] int64, the ``statistics`` that ``sample`` or ``verify`` gave for
            the draft rows under the same parameters; they are then not reduced again. What cannot
            belong to the draft token's row is an error of the request
            (``DRAFT_STATISTICS_MISMATCH``); the distributions of another row may pass, and the
            tokens then do not have the target's distribution, though none has probability 0 under
            it.
        draws: [B, K+1] int64, 64 uniform bits each in place of Philox: K acceptance tests, then the
            emitted token.
        allowed: [B, K+1, ceil(V / 32)] int32, or [N, ceil(V / 32)] with ``offsets``: allowed ids of
            each row of the target, as in ``sample``. Draft rows are not masked, so that a forbidden
            draft token is rejected; ``draft_statistics`` stay theirs. A row behind one is not used.
        eos: ids that end a text and are kept: one, several, or an integer tensor [E] or [B, E] on
            the logits' device, padded with -1. (Ids that are no tensor are copied to the device.)
        room: >= 0, most tokens that may be emitted; scalar or [B]. A request with room 0 is not
            read. With ``eos`` or ``room`` given the emitted tokens are cut, and the result is a
            ``CutVerifyResult``; without them nothing is cut.
        validate: raise where logits are probabilities, or ``draft_statistics`` are not those of the
            draft rows under the call's parameters, which are computed again. It reads tensors on
            the host, so it waits for the device and is not for graphs or ``torch.compile``.

    Raises:
        TypeError: an argument or dtype is of the wrong kind.
        ValueError: a shape, stride, device or range is wrong; names expected and given.
        PolyspecError: CUDA logits in a build without CUDA kernels.
    """
    layout = _checks.layout(_checks.BLOCK, target_logits, offsets, draft_len)
    place, rows, vocab, shape, text, offsets = layout
    batch = place[0]
    draft_tokens = _checks.table("draft_tokens", draft_tokens, place, shape, text, torch.int64)
    if draft_rows is not None:
        draft_rows = _checks.table("draft_rows", draft_rows, place, shape, text, torch.int64)
    draft_statistics, target_to_draft = _checks.drafted(
        draft_logits,
        draft_statistics,
        target_to_draft,
        place,
        vocab,
        (batch, rows - 1) if draft_rows is None else None,
    )
    if draft_lengths is not None:
        draft_lengths = _checks.table(
            "draft_lengths", draft_lengths, place, (batch,), "[B]", torch.int64
        )
    slots, held = _checks.holders(
        slots, place, temperature, top_k, top_p, min_p, seed, position, round, room
    )
    if validate is not False and _arguments.flag("validate", validate):
        values.check_logits("target_logits", target_logits)
        values.check_logits("draft_logits", draft_logits)
        if draft_logits is not None and draft_statistics is not None:
            request, row = values.rows_of_draft_tokens(
                batch, rows - 1, draft_rows, draft_lengths, offsets, draft_tokens.numel(), place[1]
            )
            parameters = (temperature, top_k, top_p, min_p)
            values.check_draft_statistics(
                draft_logits, draft_statistics, request, row, slots, parameters, statistics_of
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
        *_checks.per_request(held, temperature, top_k, top_p, min_p, seed, position, round),
        _checks.level(level),
        _checks.rule(rule),
        _checks.draws(draws, place, rows, "[B, K+1]"),
        slots,
        held[0],
        None if eos is None else _checks.ids("eos", eos, held),
        *_checks.integer("room", _checks.INT64_MAX if room is None else room, held),
        _checks.allowed(allowed, place, target_logits.shape[:-1], vocab, "[B, K+1, ceil(V / 32)]"),
    )
    return CutVerifyResult(*outputs, *ends.unbind(0)) if cuts else VerifyResult._make(outputs)


def statistics_of(
    logits: torch.Tensor, parameters: Sequence[Real | Int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics [N, 2] and status [N] of rows under temperature, top_k, top_p and min_p."""
    temperature, top_k, top_p, min_p = parameters
    drawn = sample(logits, temperature, top_k, top_p, min_p)  # type: ignore[arg-type]
    return drawn.statistics, drawn.status


def requests_of(target_logits: torch.Tensor, offsets: torch.Tensor | None) -> int:
    """Return the number of requests of a verification."""
    return target_logits.shape[0] if offsets is None else offsets.shape[0] - 1


def results_of(logits: torch.Tensor, batch: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Empty tensors like those that every verification gives first, of so many requests and rows of
    the target, and what `CutVerifyResult` has beside them, [5, B]."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return (
        empty(batch, rows),
        empty(batch),
        empty(batch, rows, dtype=torch.float32),
        empty(batch, dtype=torch.int32),
        empty(batch, rows, 2),
        empty(5, batch),
    )


def _sample_fake(logits: torch.Tensor, *rest: object) -> tuple[torch.Tensor, ...]:
    tokens, _, logprobs, status, statistics, _ = results_of(logits, logits.shape[0], 1)
    return tokens.view(-1), logprobs.view(-1), status, statistics.view(-1, 2)


def _verify_fake(
    target_logits: torch.Tensor,
    draft_tokens: object,
    offsets: torch.Tensor | None,
    draft_len: int,
    *rest: object,
) -> tuple[torch.Tensor, ...]:
    rows = target_logits.shape[1] if offsets is None else draft_len + 1
    return results_of(target_logits, requests_of(target_logits, offsets), rows)


torch.library.register_fake("polyspec::sample", _sample_fake)
torch.library.register_fake("polyspec::verify", _verify_fake)
