"""The chain's scheduler where the tokens are, as functions over torch tensors
(polyspec/device_scheduler.hpp): what every row does next, without a look at the device.

Thin on purpose: shapes and kinds are checked where the pointers are taken. Both work in CUDA graphs
and under ``torch.compile``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._C import ScheduleShape

__all__ = ["Plan", "Schedule", "ScheduleShape"]


class Plan(NamedTuple):
    """What the rows of a batch do in one step; each ``[B]`` int64.

    Attributes:
        part: 1 where a row takes part; elsewhere the next three are 0.
        counts: tokens that the level has to read.
        first: the logits behind this one of them judge the first pending token.
        lengths: tokens to draft or to judge.
        positions: absolute position of the first of these.
        rounds: key the draws.
    """

    part: torch.Tensor
    counts: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    rounds: torch.Tensor


class Schedule:
    """The windows and rounds of a chain, and the form of its lines.

    Args:
        windows, rounds: as of `Scheduler`.
        tail: tokens that a line has room for.
        steps: steps that its log has room for.
    """

    def __init__(
        self, windows: tuple[int, ...], rounds: tuple[int, ...], tail: int, steps: int
    ) -> None:
        self.windows, self.rounds = list(windows), list(rounds)
        self.shape = ScheduleShape(len(windows) + 1, tail, steps)

    def next(
        self, state: torch.Tensor, level: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rows have to do in a step of `level` (n drafts, the others judge).

        Args:
            state: ``[B, shape.words]`` int64.
            width: tokens per row that the level reads at most, T.

        Returns:
            fed ``[B, T]`` int64, ids at the front of each row, then 0; and the table ``[6, B]`` of
            which `Plan` names the rows.
        """
        shape = self.shape
        fed, plan = torch.ops.polyspec.schedule_next(
            state, self.windows, self.rounds, shape.tail, shape.steps, level, width
        )
        return fed, plan

    def report(
        self,
        state: torch.Tensor,
        level: int,
        plan: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        status: torch.Tensor,
        eos: torch.Tensor,
        nowhere: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enters what a step of `level` has brought into `state`, in place.

        Args:
            plan: of the step's `next`.
            tokens: ``[B, W]`` int64, drafted, or emitted by a verification.
            accepted: ``[B]`` int64 of a verification; None for a draft.
            status: ``[B]`` int32 of a verification, ``[B, W]`` of a draft's tokens.
            eos: ``[B, E]`` int64, ids that end a row's text; -1 is none.
            nowhere: see the first result.

        Returns:
            place ``[B, W]`` int64, where the law of each emitted token belongs among those that
            wait for the level above, `nowhere` for the others; and lengths ``[n, B]`` int64, tokens
            that each level's cache may keep.
        """
        shape = self.shape
        place, lengths = torch.ops.polyspec.schedule_report(
            state, self.windows, self.rounds, shape.tail, shape.steps, level, plan, tokens,
            accepted, status, eos, nowhere,
        )  # fmt: skip
        return place, lengths


def _next_fake(
    state: torch.Tensor,
    windows: list[int],
    rounds: list[int],
    tail: int,
    steps: int,
    level: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return state.new_empty(state.shape[0], width), state.new_empty(
        len(Plan._fields), state.shape[0]
    )


def _report_fake(
    state: torch.Tensor,
    windows: list[int],
    rounds: list[int],
    tail: int,
    steps: int,
    level: int,
    plan: torch.Tensor,
    tokens: torch.Tensor,
    accepted: torch.Tensor | None,
    status: torch.Tensor,
    eos: torch.Tensor,
    nowhere: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return state.new_empty(tokens.shape), state.new_empty(len(windows) + 1, state.shape[0])


torch.library.register_fake("polyspec::schedule_next", _next_fake)
torch.library.register_fake("polyspec::schedule_report", _report_fake)
