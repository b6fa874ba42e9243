"""The operators ``sample`` and ``verify`` as functions over torch tensors, for users and for a
chain; and ``draw``, of a chain alone.

The binding (csrc/bindings/torch_ops.cpp) checks shapes, strides, devices and data types; numbers
are checked here. Nothing reads a tensor's value, so no call waits for the device;
errors in tensor values are returned in ``status`` (see ``errors.raise_for_status``). All work under
``torch.compile`` and have fake implementations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from .. import _C, arguments
from ..arguments import INT64_MAX, kind_of
from ..errors import PolyspecError

Real = float | Tensor
Int = int | Tensor
Ids = int | Sequence[int] | Tensor

_Operator = Callable[..., tuple[Tensor, ...]]
_draw: Callable[..., Tensor] = torch.ops.polyspec.draw.default
_sample: _Operator = torch.ops.polyspec.sample.default
_verify: _Operator = torch.ops.polyspec.verify.default
_UNCUT = None, INT64_MAX, None
_TOKEN = arguments.RULES["token"]
_result: Callable[..., Any] = tuple.__new__  # faster than `NamedTuple._make`

# ---- errors of the binding, and ends of texts ----------------------------------------------------

_OF_BINDING = re.compile(r"\.[ch]pp:\d+, (?:polyspec: )?(.*)", re.DOTALL)
_OF_DISPATCHER = re.compile(
    r"type '\S*?(int|float|Tensor)\]?' for argument '(\w+)' but instead found type '([^']*)'"
)
_KINDS = {"int": "an integer", "float": "a number", "Tensor": "a tensor"}


def typed(error: RuntimeError, name: str, first: Any) -> Exception:
    """Return an error of a binding as TypeError, for wrong types and dtypes, or ValueError; other
    errors as they are. `first` is the operator's first argument, `name`."""
    if isinstance(error, NotImplementedError):  # no tensor, or of a backend without operators
        if not isinstance(first, Tensor):
            return TypeError(f"{name}: expected a tensor, given {kind_of(first)}")
        given = f"a {first.layout} tensor on {first.device}"
        return ValueError(f"{name}: expected a strided tensor on cpu or cuda, given {given}")
    if found := _OF_DISPATCHER.search(str(error)):
        return TypeError(f"{found[2]}: expected {_KINDS[found[1]]}, given {found[3]}")
    if not (found := _OF_BINDING.search(str(error))):
        return error
    if "no CUDA kernels" in found[1]:
        return PolyspecError(
            "expected tensors on the CPU, since polyspec_ext was built without CUDA kernels: "
            "reinstall with POLYSPEC_CUDA=1 in the environment"
        )
    return (TypeError if "given a tensor of dtype" in found[1] else ValueError)(found[1])


def cuts(eos: Any, room: Any, logits: Tensor) -> tuple[Any, ...]:
    """Return the ids that end texts, ``[1, E]`` (the same for all requests) or ``[B, E]`` on the
    logits' device, and the room. `eos` is an id, several (-1 is no id), or an integer tensor
    ``[E]`` or ``[B, E]``."""
    left = (0, room) if isinstance(room, Tensor) else (INT64_MAX, None)
    if room is not None and not isinstance(room, Tensor):
        left = arguments.whole("room", room), None
    if eos is None:
        return None, *left
    if isinstance(eos, Tensor):
        return (eos[None] if eos.dim() == 1 else eos), *left
    listed = list(eos) if isinstance(eos, Sequence) else [eos]
    tokens = [arguments.index("eos", entry) for entry in listed]
    if any(not -1 <= token <= INT64_MAX for token in tokens):
        raise ValueError(f"eos: expected ids >= 0, or -1 for none, given {tokens}")
    return torch.tensor([tokens], dtype=torch.int64, device=logits.device), *left


# ---- operators -----------------------------------------------------------------------------------


class SampleResult(NamedTuple):
    """Result of ``sample``.

    Attributes:
        tokens: [B] int64; -1 where the status has an error.
        logprobs: [B] float32, natural log of the token's probability; NaN where there is no token.
        status: [B] int32 bit set, 0 = no error.
        statistics: [B, 2] int64, opaque: the distribution of each token, for ``verify``'s
            ``draft_statistics``.
    """

    tokens: Tensor
    logprobs: Tensor
    status: Tensor
    statistics: Tensor


class VerifyResult(NamedTuple):
    """Result of ``verify``.

    Attributes:
        tokens: [B, K+1] int64, accepted prefix, then correction or bonus, then -1.
        num_accepted: [B] int64, accepted draft tokens.
        logprobs: [B, K+1] float32, log p of each emitted token under the processed target
            distribution; then NaN.
        status: [B] int32 bit set, 0 = no error.
        statistics: [B, K+1, 2] int64, opaque: target distribution of each emitted token, for the
            level above.
    """

    tokens: Tensor
    num_accepted: Tensor
    logprobs: Tensor
    status: Tensor
    statistics: Tensor


class CutVerifyResult(NamedTuple):
    """Result of ``verify`` with ``eos`` or ``room``: ``VerifyResult`` and five more fields.

    Attributes:
        tokens, logprobs, statistics: -1, NaN and 0 after a cut.
        num_accepted: [B] int64, emitted draft tokens.
        status: errors of rows after a cut are not reported.
        num_emitted: [B] int64, emitted tokens, an EOS included.
        ended: [B] int64 bit set: 1 the last token is an EOS, 2 the room is used up; 0 the text
            continues.
        cache_lengths: [B] int64, position + num_accepted: maximum valid length of a cache that has
            read the block. One more than next_positions where the last token is a draft token with
            a row after it; a draft token at the last row has no such row, and is not counted.
        next_ids: [B] int64, the last emitted token, input of the next pass; -1: no token.
        next_positions: [B] int64, absolute position of that token; -1: no token.
    """

    tokens: Tensor
    num_accepted: Tensor
    logprobs: Tensor
    status: Tensor
    statistics: Tensor
    num_emitted: Tensor
    ended: Tensor
    cache_lengths: Tensor
    next_ids: Tensor
    next_positions: Tensor


def has_cuda() -> bool:
    """Return whether this build has CUDA kernels and torch sees a device for them. Never raises."""
    return bool(_C.build_info()["cuda"]) and torch.cuda.is_available()


# Name, type, maximum and neutral value of the parameters, in the operators' order.
_PARAMETERS: tuple[tuple[str, type, Any, Any], ...] = (
    ("temperature", float, arguments.TEMPERATURE_MAX, 0.0),
    ("top_k", int, INT64_MAX, 0),
    ("top_p", float, 1.0, 1.0),
    ("min_p", float, 1.0, 0.0),
    ("seed", int, arguments.SEED_MAX, 0),
    ("position", int, INT64_MAX, 0),
    ("round", int, arguments.ROUND_MAX, 0),
)
_SEED = 8  # its index in `parameters_of`


def parameters_of(level: Any, *given: Any) -> list[Any]:
    """Return the parameters in the operators' form, each as a scalar, and None or a tensor that
    overrides the scalar; then the level."""
    numbers: list[Any] = []
    for (name, kind, most, neutral), value in zip(_PARAMETERS, given, strict=True):
        if isinstance(value, Tensor):
            numbers += neutral, value
        elif type(value) is kind and 0 <= value <= most:  # type: ignore[operator]
            numbers += value, None
        else:
            read: Any = arguments.whole if kind is int else arguments.number
            numbers += read(name, value, most), None
    if numbers[_SEED] > INT64_MAX:
        numbers[_SEED] -= 2**64  # the same bits as a signed number
    if type(level) is not int or not 1 <= level <= arguments.LEVEL_MAX:
        level = arguments.whole("level", level, arguments.LEVEL_MAX, 1)
    return [*numbers, level]


def sample(
    logits: Tensor,
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
    draws: Tensor | None = None,
    allowed: Tensor | None = None,
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
    *numbers, level = parameters_of(level, temperature, top_k, top_p, min_p, seed, position, round)
    nodes = node if isinstance(node, Tensor) else None
    number = 0 if nodes is not None else arguments.whole("node", node, arguments.NODE_MAX)
    try:
        outputs = _sample(logits, *numbers, number, nodes, level, draws, allowed)
    except RuntimeError as error:
        raise typed(error, "logits", logits) from None
    return _result(SampleResult, outputs)  # type: ignore[no-any-return]


def draw(
    logits: Tensor,
    parameters: Iterable[Any],
    positions: Tensor,
    rounds: Tensor,
    level: int,
    column: int,
    tokens: Tensor,
    status: Tensor,
    rows: Tensor | None,
    statistics: Tensor | None,
    nodes: Tensor | None = None,
    readable: bool = False,
) -> Tensor:
    """Sample the next token of each row (`ps.sample`) into a column of the tables ``[B, W]``, and
    copy its logits.

    Args:
        logits: ``[B, 1, V]``.
        parameters: temperature, top_k, top_p, min_p and seed: tensors ``[B]``, or numbers for
            temperature 0 and filters that are off.
        positions: ``[B]`` int64, of the tokens of column 0.
        column: < W.
        tokens: ``[B, W]`` int64.
        status: ``[B, W]`` int32.
        rows: ``[B, at least W, V]``, in the logits' dtype; None: logits are not copied.
        statistics: ``[B, as many, 2]`` int64, with `rows`.
        nodes: ``[B]`` int64, `node` of `ps.sample`; None: 0. With nodes `rows` are not written, and
            `statistics` need no `rows`.
        readable: return 0 for -1, for a pass that reads the result; not with `nodes`.

    Returns:
        ``[B, 1]`` int64, a copy of the column of `tokens`.
    """
    if nodes is not None:
        key: Any = {"position": positions + column, "level": level, "round": rounds, "node": nodes}
        drawn, _, bits, known = sample(logits[:, 0], *parameters, **key)
        tokens[:, column], status[:, column] = drawn, bits
        if statistics is not None:
            statistics[:, column] = known
        return drawn[:, None]
    temperature, top_k, top_p, min_p, seed = parameters
    try:
        return _draw(
            logits,
            temperature if isinstance(temperature, Tensor) else None,
            top_k if isinstance(top_k, Tensor) else None,
            top_p if isinstance(top_p, Tensor) else None,
            min_p if isinstance(min_p, Tensor) else None,
            seed, positions, rounds, level, column, tokens, status, rows, statistics, readable,
        )  # fmt: skip
    except RuntimeError as error:
        raise typed(error, "logits", logits) from None


@overload
def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    eos: None = None,
    room: None = None,
    **options: Any,
) -> VerifyResult: ...


@overload
def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    eos: Ids | None = None,
    room: Int | None = None,
    **options: Any,
) -> CutVerifyResult: ...


def verify(  # type: ignore[misc]
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lengths: Tensor | None = None,
    temperature: Real = 1.0,
    top_k: Int = 0,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    seed: Int = 0,
    position: Int = 0,
    level: int = 1,
    round: Int = 0,
    rule: str = "token",
    target_to_draft: Tensor | None = None,
    draft_statistics: Tensor | None = None,
    draft_rows: Tensor | None = None,
    slots: Tensor | None = None,
    offsets: Tensor | None = None,
    draft_len: int | None = None,
    draws: Tensor | None = None,
    allowed: Tensor | None = None,
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
    whole = eos is None and room is None
    try:
        *outputs, ends = _verify(
            target_logits,
            draft_tokens,
            offsets,
            draft_len,
            draft_logits,
            draft_lengths,
            draft_rows,
            draft_statistics,
            target_to_draft,
            *parameters_of(level, temperature, top_k, top_p, min_p, seed, position, round),
            _TOKEN if rule == "token" else arguments.rule(rule),
            draws,
            slots,
            *(_UNCUT if whole else cuts(eos, room, target_logits)),
            allowed,
        )
    except RuntimeError as error:
        raise typed(error, "target_logits", target_logits) from None
    if whole:
        return _result(VerifyResult, outputs)  # type: ignore[no-any-return]
    return CutVerifyResult(*outputs, *ends.unbind(0))


# ---- fake implementations ------------------------------------------------------------------------


def register_fake(operator: str, result: Callable[..., Any]) -> None:
    """Register a fake of an operator, which requires all tensors on the logits' device."""
    schema = getattr(torch.ops.polyspec, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    # A parameter that may differ per request is a scalar and a tensor: "seed", "seeds".
    names = [name[:-1] if name[:-1] in names else name for name in names]

    def fake(first: Tensor, *rest: object) -> Any:
        for name, value in zip(names[1:], rest, strict=False):
            if isinstance(value, Tensor) and value.device != first.device:
                raise ValueError(
                    f"{name}: expected the logits' device {first.device}, given {value.device}"
                )
        return result(first, *rest)

    torch.library.register_fake(f"polyspec::{operator}", fake)


def empty_results(logits: Tensor, batch: Any, rows: Any) -> tuple[Tensor, ...]:
    """Return empty tensors like the common results of all verifications, for requests of `rows`
    target rows, and a tensor [5, B] for the last fields of `CutVerifyResult`."""

    def empty(*shape: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return (
        empty(batch, rows),
        empty(batch),
        empty(batch, rows, dtype=torch.float32),
        empty(batch, dtype=torch.int32),
        empty(batch, rows, 2),
        empty(5, batch),
    )


def _sampled(logits: Tensor, *rest: object) -> tuple[Tensor, ...]:
    tokens, _, logprobs, status, statistics, _ = empty_results(logits, len(logits), 1)
    return tokens.view(-1), logprobs.view(-1), status, statistics.view(-1, 2)


def _verified(logits: Tensor, _: object, offsets: Any, most: int, *__: object) -> Any:
    if offsets is None:
        return empty_results(logits, *logits.shape[:2])
    return empty_results(logits, len(offsets) - 1, most + 1)


register_fake("sample", _sampled)
register_fake("verify", _verified)
register_fake("draw", lambda logits, *_: logits.new_empty((len(logits), 1), dtype=torch.int64))
