"""Forward passes as CUDA graphs where the host follows each step: of chains with a drafter on the
host, unbounded rounds or logits processors.

A step's tokens and numbers reach the device in one upload, and its result comes back in one read. A
pass in between is one replay. Its inputs lie at fixed addresses, and the level keeps its lengths on
the device meanwhile, so a text of any length has a graph for every size and span alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import torch

from ..drafters.base import LONGEST
from ..levels.base import BatchedLevel, DeviceLengths, InputBlock, LevelOutput
from ..ops.schedule import Plan
from ..tensors import Place, RowCounts
from .graphs import Graphs, Outputs
from .plan import size_of
from .requirements import Member
from .rows import Step


class Read(NamedTuple):
    """The result of a verification on the host, with the names of `VerifyResult`.

    Attributes:
        tokens: ``[B, W]`` int64, emitted; num_accepted: ``[B]`` int64; status: ``[B]`` int32.
        logprobs: ``[B, W]`` float32, of `tokens`.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor


def uploaded(step: Step, device: torch.device, width: int) -> Step:
    """Return a step on `device`, with at least `width` tokens a row, in one upload. The host knows
    its numbers still."""
    rows, batch = step.table.shape
    ids = torch.nn.functional.pad(step.input_ids, (0, max(0, width - step.input_ids.shape[1])))
    both = torch.cat([step.table.flatten(), ids.flatten()])
    if device.type == "cuda":
        both = both.pin_memory()
    both = both.to(device, non_blocking=True)
    table, ids = both[: rows * batch].view(rows, batch), both[rows * batch :].view(batch, -1)
    return step._replace(input_ids=ids, table=table, plan=Plan._make(table.unbind()))


class Passes:
    """Runs the passes of levels by graphs.

    Args:
        graphs: captures them.
        usual: draft tokens that can be pending for level 1 ... n-1 with the chain's windows.
    """

    def __init__(self, graphs: Graphs, usual: Sequence[int]) -> None:
        self._graphs, self._usual = graphs, usual
        # Of each size the tokens of a pass, with counts and the first token whose logits are kept.
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._cached: list[int] = []
        self._limit = 0

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle without the memory of graphs."""
        return {**self.__dict__, "_inputs": {}}

    def serves(self, part: Member) -> bool:
        """Return whether passes of a level or drafter can be captured, in the batch at hand."""
        can = part.capabilities
        return can.keeps_lengths and can.device_lengths

    def begin(
        self, step: Step, device: torch.device, cached: Sequence[int], limit: int, lag: int
    ) -> Step:
        """Begin the passes of a step, and return the step on the `device` of its level.

        Args:
            cached: tokens that the level has, by row.
            limit: no row gets longer.
            lag: tokens that rows read in front of the draft tokens, as a rule.
        """
        self._cached, self._limit = list(cached), limit
        verifies, lag = step.level <= len(self._usual), max(step.lag, lag)
        most = size_of(step.most, self._usual[step.level - 1]) if verifies else 0
        return uploaded(step, device, lag + most)._replace(lag=lag, most=most)

    def read(self, result: object) -> Read:
        """Read a verification's result in one copy. Waits for the device."""
        tokens, accepted, status, logprobs = (getattr(result, name) for name in Read._fields)
        numbers = torch.stack([accepted.to(torch.int64), status.to(torch.int64)], 1)
        bits = logprobs.view(torch.int32).to(torch.int64)
        table, width = torch.cat([numbers, tokens, bits], 1).cpu(), tokens.shape[1]
        return Read(
            table[:, 2 : 2 + width],
            table[:, 0],
            table[:, 1].to(torch.int32),
            table[:, 2 + width :].to(torch.int32).view(torch.float32),
        )

    def forward(self, level: BatchedLevel, block: InputBlock) -> LevelOutput:
        """Return the output of ``level.forward``, by a graph unless it reads a later part of a
        tree, or many tokens. Logits are valid until the level's next pass."""
        width, layers = block.tokens.shape[1], block.hidden_layers
        tree = block.parents is not None
        counts = [width] * len(self._cached) if block.counts is None else block.counts.host
        assert counts is not None, "the host follows these passes"
        self._cached = list(map(int.__add__, self._cached, counts))
        if width > LONGEST or (block.parents is not None and block.parents.shape[1] != width):
            return level.forward(block)
        lengths = cast(DeviceLengths, level)
        span, inputs = lengths.reserve_span(self._limit), self._written(id(level), block)

        def run() -> tuple[torch.Tensor | None, ...]:
            known = RowCounts(None, inputs[0]), RowCounts(None, inputs[1])
            tokens, parents = inputs[2 : 2 + width].t(), inputs[2 + width :].t() if tree else None
            own = InputBlock(tokens, block.keep, *known, parents, layers, block.depth)
            out = level.forward(own)
            states = [] if out.hidden is None else [out.hidden[layer] for layer in layers]
            return out.logits, out.skipped, *states

        key = (width, block.keep, layers, tree, block.depth, Place(self, [inputs]), span)
        kind = f"a pass of {level.name}"
        made = run() if span is None else self._graphs.run(kind, key, run)
        lengths.note_lengths(self._cached)
        logits, skipped, *states = made
        assert logits is not None
        # A later pass writes states again before the drafter has read them.
        hidden = {at: x.clone() for at, x in zip(layers, states, strict=False) if x is not None}
        return LevelOutput(logits, hidden or None, None if skipped is None else skipped.clone())

    def call(
        self,
        kind: str,
        form: Hashable,
        reserve: Callable[[int], Hashable | None],
        inputs: Sequence[torch.Tensor],
        run: Callable[..., Outputs],
    ) -> Outputs:
        """Return ``run(*inputs)`` (`CapturedPasses.call`)."""
        kept = [self._kept((kind, number), x) for number, x in enumerate(inputs)]
        span = reserve(self._limit)
        if span is None:
            return run(*kept)
        return self._graphs.run(kind, (form, Place(self, kept), span), lambda: run(*kept))

    def _kept(self, name: Hashable, x: torch.Tensor) -> torch.Tensor:
        """Return `x` at a fixed address, at few widths."""
        batch, *more = x.shape
        if more and more[0] > 1:
            more[0] = max(8, 1 << (more[0] - 1).bit_length())
        size = name, batch, *more
        if size not in self._inputs:
            self._inputs[size] = x.new_zeros(batch, *more)
        whole = self._inputs[size]
        (whole[:, : x.shape[1]] if more else whole).copy_(x)
        return whole

    def _written(self, level: int, block: InputBlock) -> torch.Tensor:
        """Return ``[2 + T, B]``, counts, first and the tokens of a block, or ``[2 + 2T, B]`` with
        the parents behind them, at a fixed address."""
        (batch, width), device = block.tokens.shape, block.tokens.device
        ids = [block.tokens] if block.parents is None else [block.tokens, block.parents]
        size = level, batch, width, block.keep, len(ids)
        if size not in self._inputs:
            self._inputs[size] = block.tokens.new_zeros(2 + len(ids) * width, batch)
        inputs = self._inputs[size]
        counts = (block.counts, width), (block.first, width - block.keep)
        for row, (known, number) in zip(inputs, counts, strict=False):
            if known is None:
                row.fill_(number)
            else:
                row.copy_(known.on(device))
        for at, values in enumerate(ids):
            inputs[2 + at * width :][:width].copy_(values.t())
        return inputs
