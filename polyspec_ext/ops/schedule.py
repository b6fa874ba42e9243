"""The operators over state rows (polyspec/round_state.hpp) as functions over torch tensors: what a
step reads, and what came of it. `HostRounds` does the same for rows in the host's memory, and finds
the step that is due.

Thin on purpose: shapes and kinds are checked where the pointers are taken. All work in CUDA graphs
and under ``torch.compile``, and wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._C import HostRounds, HostStep, RoundShape

__all__ = ["HostRounds", "HostStep", "Plan", "RoundShape", "next_step", "report"]

_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
_Two = tuple[Tensor, Tensor]
_next: Callable[..., _Two] = torch.ops.polyspec.schedule_next.default
_report: Callable[..., _Two] = torch.ops.polyspec.schedule_report.default


class Plan(NamedTuple):
    """What the rows of a batch do in one step; each ``[B]`` int64.

    Attributes:
        part: 1 where a row takes part; elsewhere the next three are 0.
        counts: tokens that the level has to read.
        first: the logits behind this one of them verify the first pending token.
        lengths: tokens to draft or to verify.
        positions: absolute position of the first of these.
        rounds: key the draws.
        of_tail: tokens of a tail among `lengths`: all or none of a draft; of those that the target
            verifies the last ones.
    """

    part: Tensor
    counts: Tensor
    first: Tensor
    lengths: Tensor
    positions: Tensor
    rounds: Tensor
    of_tail: Tensor


def next_step(state: Tensor, shape: RoundShape, level: int, width: int) -> _Two:
    """Return the work of the rows in a step of `level`.

    Args:
        state: ``[B, shape.words]`` int64.
        width: tokens per row that the level reads at most, T.

    Returns:
        input_ids ``[B, T]`` int64, ids at the front of each row, then 0; and the table ``[7, B]``
        of which `Plan` names the rows.
    """
    return _next(state, shape.levels, shape.steps, level, width)


def report(
    state: Tensor,
    shape: RoundShape,
    level: int,
    plan: Tensor,
    tokens: Tensor,
    counts: Tensor | None,
    status: Tensor,
    eos: Tensor,
    padding: int,
) -> _Two:
    """Enter the results of a step of `level` into `state`, in place.

    Args:
        plan: of the step's `next_step`.
        tokens: ``[B, W]`` int64, drafted, or emitted by a verification.
        counts: ``[B]`` int64, accepted by a verification; of a draft, how many were proposed, or
            None for as many as were asked for.
        status: ``[B]`` int32 of a verification, ``[B, W]`` of a draft's tokens.
        eos: ``[B, E]`` int64, ids that end a row's text; -1 is none.
        padding: see the first result.

    Returns:
        slots ``[B, W]`` int64, where each emitted token stands among those that are pending for
        the level above (those of a tail: for the target), `padding` for the others; and kept
        ``[n, B]`` int64, tokens that each level's cache may keep.
    """
    return _report(
        state, shape.levels, shape.steps, level, plan, tokens, counts, status, eos, padding
    )


@_fake("polyspec::schedule_next")
def _(state: Tensor, *numbers: int) -> _Two:
    batch, width = state.shape[0], numbers[-1]
    return state.new_empty(batch, width), state.new_empty(len(Plan._fields), batch)


@_fake("polyspec::schedule_report")
def _(*given: Any) -> _Two:
    state, levels, _, _, _, tokens, *_ = given
    return state.new_empty(tokens.shape), state.new_empty(levels, state.shape[0])
