"""Verification of chains of tokens, and what is handed up of it, as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..drafters.base import RowBuffer
from ..levels.base import IdMap
from ..ops import unchecked
from ..tensors import RowParameters, moved
from .requirements import ChainConfig
from .state import Step


def pending_tokens(input_ids: torch.Tensor, first: torch.Tensor, width: int) -> torch.Tensor:
    """``[B, width]``, the tokens to be verified among those that the level has just read.

    Args:
        first: ``[B]`` int64, they begin behind this one.
    """
    reach = first[:, None] + torch.arange(1, width + 1, device=input_ids.device)
    # Ids past a row's own tokens are not read, so the last column may be read again.
    return input_ids.gather(1, reach.clamp_max(input_ids.shape[1] - 1))


def verify(
    config: ChainConfig,
    step: Step,
    logits: torch.Tensor,
    rows: RowBuffer | None,
    parameters: RowParameters,
    target_to_draft: torch.Tensor | None = None,
) -> Any:
    """A level verifies the tokens that are pending for it.

    Args:
        logits: ``[B, W + 1, V]``, its own, from the token before the first pending one on; W is the
            step's `most`.
        rows: ``[B, at least W, Vd]``, what the tokens were drawn from; None: the proposals are
            deterministic.
        target_to_draft: ``[V]`` int32, as of `ps.verify`, where the rows are of a drafter that
            draws a part of the ids.

    Returns:
        `ops.VerifyResult`.
    """
    device, most = logits.device, step.most
    own = step.on(device)
    if step.host is None:
        tokens = pending_tokens(moved(step.input_ids, device), own.first, most)
    else:
        tokens = torch.from_numpy(step.host.pending())
        if tokens.device != device:
            tokens = tokens.to(device)
    draft_logits, statistics = (None, None) if rows is None else rows
    if draft_logits is not None and draft_logits.shape[1] > most:
        draft_logits = draft_logits[:, :most]
        statistics = None if statistics is None else statistics[:, :most]
    return config.operators.verify(
        logits,
        tokens,
        draft_logits,
        draft_lengths=own.lengths,
        **parameters.on(device),
        position=own.positions,
        level=step.level,
        round=own.rounds,
        rule=config.rule,
        draft_statistics=statistics,
        target_to_draft=None if draft_logits is None else target_to_draft,
    )


def hand_up(
    buffer: RowBuffer | None, rows: RowBuffer, slots: torch.Tensor, length: int
) -> RowBuffer:
    """Keeps the rows that emitted tokens were drawn from, for the level above (contract C1).

    They are copied: blocks of several passes are pending at once, and a level may write its logits
    again with its next pass, so the rows that `draft_rows` could name are gone by then. Where one
    block is all that can be pending, nothing is copied (`Buffers.direct`).

    Args:
        buffer: of an earlier step, written in place where it has room.
        rows: ``[B, W, V]``, with their statistics.
        slots: ``[B, W]`` int64, where each belongs among those pending; `length` for the others.
        length: rows that can be pending.
    """
    logits, statistics = rows
    assert statistics is not None
    batch, _, vocab = logits.shape
    if (
        buffer is None
        # Windows may change: one that only grows is never again where an earlier graph wrote it.
        or buffer.logits.shape[1] <= length
        or (buffer.logits.shape[0], buffer.logits.shape[2]) != (batch, vocab)
        or (
            buffer.logits.dtype != logits.dtype
            and torch.promote_types(buffer.logits.dtype, logits.dtype) != buffer.logits.dtype
        )
        or buffer.logits.device != logits.device
    ):
        # Zeros: what no row fills is handed to the operator as well, and must be harmless.
        buffer = RowBuffer(
            logits.new_zeros(batch, length + 1, vocab), statistics.new_zeros(batch, length + 1, 2)
        )
    own = logits.to(buffer.logits.dtype)
    unchecked.put_rows(buffer.logits, buffer.statistics, own, statistics, slots, length)
    return buffer


def hand_up_tail(
    buffer: RowBuffer,
    tokens: torch.Tensor,
    rows: RowBuffer | None,
    slots: torch.Tensor,
    id_map: IdMap,
) -> tuple[RowBuffer, bool]:
    """`hand_up` of the rows that a drafter drew a tail from, behind those of the level below the
    target.

    Args:
        buffer: of that level; what stands in it stays.
        tokens: ``[B, W]``, drafted.
        rows: ``[B, at least W, Vd]``; None: the proposals are deterministic.
        slots: as of `hand_up`.
        id_map: of the drafter.

    Returns:
        `buffer`, or one of a wider type that takes its place; and whether it has the statistics of
        these rows.
    """
    width, vocab = tokens.shape[1], buffer.logits.shape[2]
    device = buffer.logits.device
    if rows is None:
        logits = buffer.logits.new_full((*tokens.shape, vocab), -float("inf"))
        ids = tokens.to(device).clamp_min(0)[..., None]
        statistics, logits = None, logits.scatter_(2, ids, 0.0)
    else:
        logits, statistics = rows
        logits = logits[:, :width]
        if logits.shape[2] < vocab:  # the distribution of these rows is of fewer masses
            logits, statistics = id_map.spread(logits, vocab), None
    logits = logits.to(device)
    dtype = torch.promote_types(buffer.logits.dtype, logits.dtype)
    if dtype != buffer.logits.dtype:  # nothing of either is rounded
        buffer = RowBuffer(buffer.logits.to(dtype), buffer.statistics)
    statistics = None if statistics is None else statistics[:, :width].to(device)
    known = None if statistics is None else buffer.statistics
    padding = buffer.logits.shape[1] - 1
    unchecked.put_rows(
        buffer.logits, known, logits.to(dtype), statistics, slots.to(device), padding
    )
    return buffer, statistics is not None
