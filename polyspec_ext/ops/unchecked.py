"""The operators for a chain, which creates their tensors: arguments are checked only where the
pointers are taken. Results and fake implementations also serve `ops.verification`.

Arguments as of `ps.sample`, `ps.verify` and `ps.verify_tree`, with parameters per request as
tensors ``[B]`` on the logits' device: float32 (temperature, top_p, min_p) or int64. A number
instead means temperature 0 or filter off. `target_to_draft` is int32, on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import RULES

_draw: Callable[..., Tensor] = torch.ops.polyspec.draw.default
_sample: Callable[..., tuple[Tensor, ...]] = torch.ops.polyspec.sample.default
_put_rows = torch.ops.polyspec.put_rows.default
_verify = torch.ops.polyspec.verify.default
_verify_tree = torch.ops.polyspec.verify_tree.default
_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
_NO_LIMIT = 2**63 - 1  # of emitted tokens
_BY_ROW = Tensor  # any other value is off; the operators get the scalar for off


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

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor


class TreeVerifyResult(NamedTuple):
    """Result of ``verify_tree``.

    Attributes:
        tokens: [B, D+1] int64, the accepted path's tokens, then correction or bonus, then -1.
        num_accepted: [B] int64, nodes of the accepted path.
        path: [B, D] int64, the nodes of the path, then -1.
        rows: [B, D+1] int64, the row of ``target_logits`` of each token: 0, or a node + 1; then -1.
        logprobs: [B, D+1] float32, log p of each emitted token under the processed target
            distribution; then NaN.
        status: [B] int32 bit set, 0 = no error.
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


def draw(
    logits: Tensor,
    parameters: Iterable[Tensor | float],
    positions: Tensor,
    rounds: Tensor,
    level: int,
    column: int,
    tokens: Tensor,
    status: Tensor,
    rows: Tensor | None,
    statistics: Tensor | None,
    nodes: Tensor | None = None,
) -> Tensor:
    """Sample the next token of each row (`ps.sample`) into a column of the tables ``[B, W]``, and
    copy its logits.

    Args:
        logits: ``[B, 1, V]``.
        parameters: temperature, top_k, top_p, min_p and seed.
        positions: ``[B]`` int64, of the tokens of column 0.
        column: < W.
        tokens: ``[B, W]`` int64.
        status: ``[B, W]`` int32.
        rows: ``[B, at least W, V]``, in the logits' dtype; None: logits are not copied.
        statistics: ``[B, as many, 2]`` int64, with `rows`.
        nodes: ``[B]`` int64, `node` of `ps.sample`; None: 0. With nodes `rows` are not written, and
            `statistics` need no `rows`.

    Returns:
        ``[B, 1]`` int64, a copy of the column of `tokens`.
    """
    temperature, top_k, top_p, min_p, seed = parameters
    temperatures = temperature if isinstance(temperature, _BY_ROW) else None
    top_ks = top_k if isinstance(top_k, _BY_ROW) else None
    top_ps = top_p if isinstance(top_p, _BY_ROW) else None
    min_ps = min_p if isinstance(min_p, _BY_ROW) else None
    if nodes is not None:
        # fmt: off
        drawn, _, bits, known = _sample(
            logits[:, 0], 0.0, temperatures, 0, top_ks, 1.0, top_ps, 0.0, min_ps, 0, seed, 0,
            positions + column, 0, rounds, 0, nodes, level, None, None,
        )
        # fmt: on
        tokens[:, column], status[:, column] = drawn, bits
        if statistics is not None:
            statistics[:, column] = known
        return drawn[:, None]
    # fmt: off
    return _draw(
        logits, temperatures, top_ks, top_ps, min_ps, seed, positions, rounds, level, column,
        tokens, status, rows, statistics,
    )
    # fmt: on


def put_rows(
    table: Tensor,
    statistics: Tensor | None,
    rows: Tensor,
    rows_statistics: Tensor | None,
    slots: Tensor,
    padding: int,
) -> None:
    """Copy rows of a block to their slots in a table, with their statistics.

    Args:
        table: ``[B, N, V]``.
        statistics: ``[B, N, 2]`` int64; None: not kept.
        rows: ``[B, W, V]``, in the table's dtype.
        rows_statistics: ``[B, W, 2]`` int64, with `statistics`.
        slots: ``[B, W]`` int64 in ``[0, N)``; distinct in a row, but for `padding`.
        padding: slot of rows to discard; its contents afterwards are undefined.
    """
    if table.device.type == "cpu":
        _put_rows(table, statistics, rows, rows_statistics, slots, padding)
        return
    at = torch.arange(len(table), device=slots.device)[:, None], slots
    table.index_put_(at, rows)
    if statistics is not None:
        assert rows_statistics is not None
        statistics.index_put_(at, rows_statistics)


def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    *,
    draft_lengths: Tensor | None,
    temperature: Tensor | float,
    top_k: Tensor | float,
    top_p: Tensor | float,
    min_p: Tensor | float,
    seed: Tensor,
    position: Tensor,
    level: int,
    round: Tensor,
    rule: str,
    draft_statistics: Tensor | None,
    target_to_draft: Tensor | None = None,
    allowed: Tensor | None = None,
) -> VerifyResult:
    """Verify as `ps.verify`, without cuts."""
    if draft_statistics is not None:
        draft_statistics = draft_statistics.contiguous()
    temperatures = temperature if isinstance(temperature, _BY_ROW) else None
    top_ks = top_k if isinstance(top_k, _BY_ROW) else None
    top_ps = top_p if isinstance(top_p, _BY_ROW) else None
    min_ps = min_p if isinstance(min_p, _BY_ROW) else None
    # fmt: off
    *outputs, _ = _verify(
        target_logits, draft_tokens, None, 0, draft_logits, draft_lengths, None, draft_statistics,
        target_to_draft, 0.0, temperatures, 0, top_ks, 1.0, top_ps, 0.0, min_ps, 0, seed, 0,
        position, 0, round, level, RULES[rule], None, None, 0, None, _NO_LIMIT, None, allowed,
    )
    # fmt: on
    return VerifyResult._make(outputs)


def verify_tree(
    target_logits: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor | None,
    *,
    counts: Tensor,
    draft_rows: Tensor | None,
    draft_statistics: Tensor | None,
    depth: int,
    temperature: Tensor | float,
    top_k: Tensor | float,
    top_p: Tensor | float,
    min_p: Tensor | float,
    seed: Tensor,
    position: Tensor,
    level: int,
    round: Tensor,
    rule: str = "token",
    target_to_draft: Tensor | None = None,
    allowed: Tensor | None = None,
) -> TreeVerifyResult:
    """Verify as `ps.verify_tree`, without cuts."""
    temperatures = temperature if isinstance(temperature, _BY_ROW) else None
    top_ks = top_k if isinstance(top_k, _BY_ROW) else None
    top_ps = top_p if isinstance(top_p, _BY_ROW) else None
    min_ps = min_p if isinstance(min_p, _BY_ROW) else None
    # fmt: off
    tokens, accepted, logprobs, status, statistics, path, rows, ends = _verify_tree(
        target_logits, draft_tokens.contiguous(), parents.contiguous(), None, parents.shape[1],
        depth, counts, draft_logits, draft_rows, draft_statistics, target_to_draft, 0.0,
        temperatures, 0, top_ks, 1.0, top_ps, 0.0, min_ps, 0, seed, 0, position, 0, round, level,
        RULES[rule], None, None, 0, None, _NO_LIMIT, None, allowed,
    )
    # fmt: on
    return TreeVerifyResult(
        tokens, accepted, path, rows, logprobs, status, statistics, *ends.unbind(0)
    )


def _results(logits: Tensor, offsets: Tensor | None, rows: int) -> tuple[Tensor, ...]:
    """Return empty tensors like the common results of all verifications, for requests of `rows`
    target rows, and a tensor [5, B] for the last fields of `CutVerifyResult`."""
    batch = len(logits) if offsets is None else len(offsets) - 1

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return (
        empty(batch, rows),
        empty(batch),
        empty(batch, rows, dtype=torch.float32),
        empty(batch, dtype=torch.int32),
        empty(batch, rows, 2),
        empty(5, batch),
    )


@_fake("polyspec::sample")
def _(logits: Tensor, *arguments: object) -> tuple[Tensor, ...]:
    tokens, _, logprobs, status, statistics, _ = _results(logits, None, 1)
    return tokens.view(-1), logprobs.view(-1), status, statistics.view(-1, 2)


@_fake("polyspec::verify")
def _(logits: Tensor, _: object, offsets: Any, most: int, *__: object) -> tuple[Tensor, ...]:
    return _results(logits, offsets, logits.shape[1] if offsets is None else most + 1)


@_fake("polyspec::verify_tree")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    logits, _, _, offsets, _, depth, *_ = arguments
    *emitted, ends = _results(logits, offsets, depth + 1)
    tokens = emitted[0]
    return (*emitted, tokens.new_empty(len(tokens), depth), torch.empty_like(tokens), ends)


def _together(first: Tensor, tensors: Iterable[object]) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device != first.device:
            raise ValueError(f"expected tensors on {first.device}, given one on {tensor.device}")


@_fake("polyspec::draw")
def _(logits: Tensor, *rest: object) -> Tensor:
    _together(logits, rest)
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int64)


_fake("polyspec::put_rows")(lambda table, *rest: _together(table, rest))
