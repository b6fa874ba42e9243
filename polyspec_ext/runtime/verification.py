"""One verification of a batch: what a level reads, and its verdict on what waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .. import ops
from ..levels import device_of
from ..returned import require_logits
from ..tensors import Parameters, feed, integers, on_device
from . import steps as captured
from .request import Chunk, PendingLaws, Row

if TYPE_CHECKING:
    from ..chain import Chain
    from ..integrations.processors import LawProcessors

Group = list[tuple[Row, int]]  # rows that take a step together, and their counts


def judge(
    chain: Chain,
    index: int,
    group: Group,
    slots: Sequence[Row],
    pending: PendingLaws,
    parameters: Parameters,
    unread: torch.Tensor | None,
    processors: LawProcessors | None,
) -> tuple[ops.VerifyResult, torch.Tensor]:
    """Level `index` (from 0) reads what it lacks and judges the tokens that wait in `group`.

    Args:
        slots: all rows in the caches; those without a part append nothing, and what is returned for
            them means nothing.
        pending: the laws that the tokens were drawn from; forgets them.
        unread: ids of tokens that the host has not seen.
        processors: change the level's logits first.

    Returns:
        The verdict, and the logits ``[B, width + 1, V]`` from the first waiting token on.
    """
    width = max(count for _, count in group)
    lists: list[list[int]] = [[] for _ in slots]
    first, lengths = [0] * len(slots), [0] * len(slots)
    for row, count in group:
        lists[row.slot] = row.tokens[row.cached[index] :]
        first[row.slot], lengths[row.slot] = len(lists[row.slot]) - count - 1, count
    level = chain.levels[index]
    fed, counts = feed(lists, level, unread)
    chunk = pending.take(group, width)
    call = _Call(chain, index, slots, fed, counts, first, lengths, width, chunk, parameters)
    if processors is None and chain.graphs is not None:
        found = call.captured()
        if found is not None:
            return found
    logits, drafted = call.forward()
    if processors is not None:
        changed = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
        for row, count in group:
            prefix = torch.tensor(row.tokens, device=logits.device)
            own = logits[row.slot, : count + 1]
            changed[row.slot, : count + 1] = processors.apply(own, prefix, row.number)
        logits = changed
    return call.verify(logits, drafted), logits


class _Call:
    """The arguments of one verification."""

    def __init__(
        self,
        chain: Chain,
        index: int,
        slots: Sequence[Row],
        fed: torch.Tensor,
        counts: list[int] | None,
        first: list[int],
        lengths: list[int],
        width: int,
        chunk: Chunk | None,
        parameters: Parameters,
    ) -> None:
        self.chain, self.index, self.level = chain, index, chain.levels[index]
        self.fed, self.counts, self.first, self.width = fed, counts, first, width
        self.lengths, self.chunk, self.parameters = lengths, chunk, parameters
        self.cached = [row.cached[index] for row in slots]
        self.rounds = [row.rounds[index] for row in slots]
        self.starts = [len(row.tokens) - count for row, count in zip(slots, lengths, strict=True)]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[B, width + 1, V]`` from the first waiting token on, and those ``[B, width]``
        tokens."""
        fed, width, vocab = self.fed, self.width, self.chain.vocab_sizes[self.index]
        name, device = self.chain.names[self.index], device_of(self.level)
        if self.counts is None and all(n == fed.shape[1] - width - 1 for n in self.first):
            logits = self.level.forward(fed, width + 1)
            drafted = fed[:, fed.shape[1] - width :]
        else:
            logits = self.level.forward(
                fed,
                width + 1,
                self.counts,
                self.first,  # type: ignore[call-arg]
            )
            # Ids past a count are not looked at, so the last column may be read again.
            reach = on_device(self.first, torch.int64, fed.device)[:, None] + torch.arange(
                1, width + 1, device=fed.device
            )
            drafted = fed.gather(1, reach.clamp_max(fed.shape[1] - 1))
        own = self.level.vocab_size
        require_logits(name, logits, fed.shape[0], width + 1, own, device)
        return (logits if vocab == own else logits[..., :vocab]), drafted

    def verify(self, logits: torch.Tensor, drafted: torch.Tensor) -> ops.VerifyResult:
        device, chunk, lengths = logits.device, self.chunk, self.lengths
        even = lengths.count(self.width) == len(lengths)
        verdict: ops.VerifyResult = ops.verify(
            logits,
            drafted,
            None if chunk is None else chunk.logits,
            draft_lengths=None if even else on_device(lengths, torch.int64, device),
            **self.parameters.on(device),
            position=integers(self.starts, device),
            level=self.index + 1,
            round=integers(self.rounds, device),
            rule=self.chain.rule,
            draft_laws=None if chunk is None else chunk.laws,
        )
        return verdict

    def captured(self) -> tuple[ops.VerifyResult, torch.Tensor] | None:
        """The same as one graph; None where this call cannot be one."""
        chain, level, index, width = self.chain, self.level, self.index, self.width
        # A level below the target may have to read one token more, the one it did not draw itself.
        longest = width + 1 + (index > 0)
        if not isinstance(level, captured.CapturableLevel) or self.fed.shape[1] > longest:
            return None
        place = level.graph_key([longest])
        if place is None:
            return None
        device, vocab = self.fed.device, chain.vocab_sizes[index]
        counts = self.counts or [self.fed.shape[1]] * len(self.first)
        table = on_device(
            [counts, self.first, self.lengths, self.starts, self.rounds], torch.int64, device
        )
        chunk = self.chunk
        assert chain.graphs is not None
        outputs = chain.graphs.run(
            f"a verification by {chain.names[index]}",
            [index, width, chain.rule, place],
            captured.verify_step(level, vocab, index + 1, width, chain.rule),
            [
                F.pad(self.fed, (0, longest - self.fed.shape[1])),
                *table,
                None if chunk is None else chunk.logits,
                None if chunk is None else chunk.laws,
                *self.parameters.tensors(device),
            ],
        )
        level.passed([have + n for have, n in zip(self.cached, counts, strict=True)])
        *fields, logits = outputs
        assert logits is not None
        verdict = ops.VerifyResult._make(fields)
        if index > 0:
            # They go up as the law behind what this level emits, and wait there while the graph
            # runs again.
            logits, verdict = logits.clone(), verdict._replace(laws=verdict.laws.clone())
        return verdict, logits
