"""What a chain keeps on the device from one round of the target to the next, and the steps of a
round, which work on it and on the levels' caches alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..drafters import DraftModel
from ..levels import device_of
from ..ops.schedule import Plan, Schedule
from ..tensors import Parameters, on_device
from . import steps as captured
from .graphs import Place
from .plan import Program
from .request import Row

if TYPE_CHECKING:
    from ..chain import Chain

Outputs = tuple[torch.Tensor | None, ...]


class Lines:
    """What stays at its place on the device from round to round, for one batch size: a line per
    row, the parameters, and the laws that wait to be judged; and the steps that work on them.

    Args:
        chain: whose drafter is a model, on one device.
        levels: all of them, the drafter's last.
        steps: of a round.
        batch: rows, B.
        eos: ids that end a text, at most.
        greedy: the temperature of all rows is 0, so nobody asks for laws.
    """

    def __init__(
        self,
        chain: Chain,
        levels: Sequence[Any],
        steps: Program,
        *,
        batch: int,
        eos: int,
        greedy: bool,
    ) -> None:
        self._chain, self._levels, self._steps, self._greedy = chain, levels, steps, greedy
        device = device_of(chain.levels[0])
        self._schedule = Schedule(steps.windows, steps.rounds, steps.tail, len(steps.steps))
        self.state = torch.zeros(
            batch, self._schedule.shape.words, dtype=torch.int64, device=device
        )
        self.eos = torch.full((batch, eos), -1, dtype=torch.int64, device=device)
        self._written: Parameters | None = None
        self.parameters: list[torch.Tensor] = []
        # By the level that will judge them; made when the first are there.
        self._laws: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        laws = [tensor for both in self._laws.values() for tensor in both]
        return [self.state, self.eos, *self.parameters, *laws]

    @property
    def place(self) -> Place:
        """It as part of a graph's key."""
        return Place(self, self.tensors)

    def write(
        self, slots: Sequence[Row], parameters: Parameters, drafted: Sequence[int] | None
    ) -> None:
        """Begin a round of these rows.

        Args:
            drafted: tokens in the drafter's cache, by slot.
        """
        shape, steps, device = self._schedule.shape, self._steps, self.state.device
        table = [[0] * shape.words for _ in slots]
        for slot, (row, line) in enumerate(zip(slots, table, strict=True)):
            cached = [*row.cached, 0 if drafted is None else drafted[slot]]
            total = len(row.tokens)
            # Levels without a part in the round may be far behind, rows that are complete too.
            asked = [have for number, have in enumerate(cached, 1) if number in steps.steps]
            origin = max(min(asked), total - steps.levels)
            line[shape.ORIGIN], line[shape.TOTAL] = origin, total - origin
            line[shape.ROOM] = 0 if row.ended else row.room
            for number, have in enumerate(cached, 1):
                line[shape.level_at(number) + shape.CACHED] = have - origin
            for number, done in enumerate([*row.rounds, row.context.round], 1):
                line[shape.level_at(number) + shape.ROUND] = done
            line[shape.tail_at : shape.tail_at + total - origin] = row.tokens[origin:]
        self.state.copy_(on_device(table, torch.int64, device), non_blocking=True)
        if self._written is parameters:
            return
        self._written = parameters
        given = parameters.tensors(device)
        ends = [sorted(row.eos) + [-1] * (self.eos.shape[1] - len(row.eos)) for row in slots]
        self.eos.copy_(on_device(ends, torch.int64, device), non_blocking=True)
        if not self.parameters:
            self.parameters = [own.clone() for own in given]
        for own, new in zip(self.parameters, given, strict=True):
            own.copy_(new, non_blocking=True)

    def draft(self) -> Outputs:
        """The step of the drafter."""
        steps, drafter = self._steps, self._chain.drafter
        assert isinstance(drafter, DraftModel)
        number, k = steps.levels, steps.drafts
        fed, table = self._schedule.next(self.state, number, steps.width(number))
        plan = Plan(*table)
        draft = captured.draft_step(drafter.level, drafter.vocab_size, number, k, not self._greedy)
        drawn, status, logits, laws = draft(
            fed, plan.counts, plan.positions, plan.rounds, *self.parameters
        )
        assert drawn is not None
        assert status is not None
        self._schedule.report(self.state, number, table, drawn, None, status, self.eos, k)
        if logits is not None and laws is not None:
            # Nothing waits for the level above when a draft begins.
            waiting, theirs = self._waiting(number - 1, logits, laws)
            waiting[:, :k].copy_(logits)
            theirs[:, :k].copy_(laws)
        return ()

    def verify(self, number: int) -> Callable[[], Outputs]:
        """The step of level `number`."""
        chain, steps = self._chain, self._steps
        most = steps.most[number - 1]
        judge = captured.verify_step(
            self._levels[number - 1], chain.vocab_sizes[number - 1], number, most, chain.rule
        )

        def step() -> Outputs:
            fed, table = self._schedule.next(self.state, number, steps.width(number))
            waiting = None if self._greedy or most == 0 else self._laws[number]
            *fields, logits = judge(
                fed,
                *Plan(*table)[1:],
                None if waiting is None else waiting[0][:, :most],
                None if waiting is None else waiting[1][:, :most],
                *self.parameters,
            )
            r = ops.VerifyResult._make(fields)
            assert logits is not None
            nowhere = steps.most[number - 2] if number > 1 else 0
            place, lengths = self._schedule.report(
                self.state, number, table, r.tokens, r.num_accepted, r.status, self.eos, nowhere
            )
            for below in range(number, steps.levels + 1):
                if below in steps.steps:
                    self._levels[below - 1].keep(lengths[below - 1])
            if number == 1:
                bits = r.logprobs.view(torch.int32).to(torch.int64)
                return torch.cat([self.state, bits], 1), logits
            if not self._greedy:
                above, theirs = self._waiting(number - 1, logits, r.laws)
                at = place[..., None]
                above.scatter_(1, at.expand_as(logits), logits)
                theirs.scatter_(1, at.expand_as(r.laws), r.laws)
            return ()

        return step

    def _waiting(
        self, level: int, logits: torch.Tensor, laws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The laws that wait for `level`, ``[B, most + 1, Vd]`` and ``[B, most + 1, 2]``; what is
        placed nowhere goes to the last."""
        if level not in self._laws:
            batch, length = logits.shape[0], self._steps.most[level - 1] + 1
            # Zeros: what no row fills is handed to the operator as well, and must be harmless.
            self._laws[level] = (
                logits.new_zeros(batch, length, logits.shape[2]),
                laws.new_zeros(batch, length, 2),
            )
        return self._laws[level]
