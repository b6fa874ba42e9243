"""The operators over state rows (polyspec/round_state.hpp) as functions over torch tensors: input
and results of a step. `HostRounds` does the same for rows in the host's memory, and determines the
next step.

Thin on purpose: shapes and dtypes are checked where the pointers are taken. All work in CUDA graphs
and under ``torch.compile``, and never wait for the device.
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
_Three = tuple[Tensor, Tensor, Tensor]
_next: Callable[..., _Three] = torch.ops.polyspec.schedule_next.default
_report: Callable[..., _Two] = torch.ops.polyspec.schedule_report.default


class Plan(NamedTuple):
    """Work of the rows of a batch in a step; each ``[B]`` int64.

    Attributes:
        part: 1 in rows of the step; 0 in idle rows, where `counts`, `first` and `lengths` are 0.
        counts: tokens that the level has to read.
        first: index among them of the token with the logits that verify the first pending token.
        lengths: tokens to draft or to verify.
        positions: absolute position of the first token to draft or to verify.
        rounds: round counts, which key the draws.
        of_tail: tokens of a tail among `lengths`: all or none in a draft; in the target's
            verification the last tokens.
    """

    part: Tensor
    counts: Tensor
    first: Tensor
    lengths: Tensor
    positions: Tensor
    rounds: Tensor
    of_tail: Tensor


def next_step(state: Tensor, shape: RoundShape, level: int, width: int, most: int = 0) -> _Three:
    """Return the work of the rows in a step of `level`.

    Args:
        state: ``[B, shape.words]`` int64.
        width: maximum tokens that the level reads per row, T.
        most: maximum tokens that it verifies per row, W.

    Returns:
        input_ids ``[B, T]`` int64, left-aligned ids of each row, then 0; the table ``[7, B]`` with
        the rows of `Plan`; and the ids to verify, ``[B, W]`` int64, then 0.
    """
    return _next(state, shape.levels, shape.steps, level, width, most)


def report(
    state: Tensor,
    shape: RoundShape,
    level: int,
    plan: Tensor,
    tokens: Tensor,
    counts: Tensor | None,
    status: Tensor,
    eos: Tensor,
) -> _Two:
    """Enter the results of a step of `level` into `state`, in place.

    Args:
        plan: table of the step from `next_step`.
        tokens: ``[B, W]`` int64, drafted, or emitted by a verification.
        counts: ``[B]`` int64, tokens accepted by a verification, or proposed by a draft; None: the
            requested number of draft tokens.
        status: ``[B]`` int32 of a verification, ``[B, W]`` of a draft's tokens.
        eos: ``[B, E]`` int64, ids that end a row's text, padded with -1.

    Returns:
        appended ``[2, B]`` int64, how many tokens were pending for the level above (for tail tokens
        the target), and how many emitted tokens follow them; and kept ``[n, B]`` int64, the maximum
        valid length of each level's cache.
    """
    return _report(state, shape.levels, shape.steps, level, plan, tokens, counts, status, eos)


@_fake("polyspec::schedule_next")
def _(state: Tensor, *numbers: int) -> _Three:
    batch, (width, most) = len(state), numbers[-2:]
    sizes = (batch, width), (len(Plan._fields), batch), (batch, most)
    return state.new_empty(sizes[0]), state.new_empty(sizes[1]), state.new_empty(sizes[2])


@_fake("polyspec::schedule_report")
def _(*arguments: Any) -> _Two:
    state, levels, *_ = arguments
    return state.new_empty(2, state.shape[0]), state.new_empty(levels, state.shape[0])
