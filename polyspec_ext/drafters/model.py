"""A small language model as drafter: the ordinary case."""

from __future__ import annotations

import time

import torch

from .. import ops
from ..errors import raise_for_status
from ..levels import Level, feed
from .base import Context, Proposal


class DraftModel:
    """Draws k tokens one after another from a level's processed law.

    Args:
        level: the model; its cache belongs to this drafter from now on.
        vocab_size: ids from here on are cut off the logits before anything is drawn (a padded
            vocabulary, or one larger than the level's above). None: the level's own.
    """

    def __init__(self, level: Level, vocab_size: int | None = None) -> None:
        self.level = level
        self.vocab_size = (
            level.vocab_size if vocab_size is None else min(vocab_size, level.vocab_size)
        )
        self.name = getattr(level, "name", type(level).__name__)
        self.device = torch.device(getattr(level, "device", "cpu"))
        self.num_forward_passes = 0
        self.prefill_seconds = 0.0
        self._cached = 0  # leading tokens of the context whose keys and values the level holds
        self._rows: torch.Tensor | None = None  # [1, k, Vd], reused by every proposal
        self._laws: torch.Tensor | None = None  # [1, k, 2]

    def propose(self, context: Context, k: int) -> Proposal:
        """`k` tokens, fewer only after an EOS. Raises RequestError where a row of logits has no
        law."""
        tokens, sampling = context.tokens, context.sampling
        if context.valid == 0:
            self._prefill(tokens)
        elif self._cached > context.valid:
            self.level.rollback([context.valid])
            self._cached = context.valid
        on_cpu = self.device.type == "cpu"
        keep_rows = not sampling.greedy
        position = len(tokens)
        fed = feed(tokens[self._cached :], self.level)
        drawn: list[torch.Tensor] = []
        values: list[int] = []
        rows: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        status: list[torch.Tensor] = []
        for i in range(k):
            logits = self.level.forward(fed, 1)
            self.num_forward_passes += 1
            if logits.shape[-1] > self.vocab_size:
                logits = logits[..., : self.vocab_size]
            s = ops.sample(
                logits[:, 0],
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                context.seed,
                position + i,
                context.level,
                context.round,
            )
            if keep_rows:
                rows.append(logits)
                laws.append(s.laws)
            if on_cpu:
                value = int(s.tokens)
                if value < 0:
                    raise_for_status(s.status, level=context.level, position=position + i)
                values.append(value)
                if value in context.eos:
                    break
                fed = s.tokens.view(1, 1)
            else:
                # Reading a token would stall the device, so a window is drafted whole and looked
                # at once, below.
                drawn.append(s.tokens)
                status.append(s.status)
                fed = s.tokens.clamp_min(0).view(1, 1)
        if not on_cpu:
            values = torch.cat(drawn).tolist()
            if min(values) < 0:
                bad = next(i for i, value in enumerate(values) if value < 0)
                raise_for_status(status[bad], level=context.level, position=position + bad)
        # The last token drawn was fed to nobody yet.
        self._cached = position + (len(values) if on_cpu else k) - 1
        if not keep_rows:
            return Proposal(values)
        return self._gather(values, rows, laws)

    def _prefill(self, tokens: list[int]) -> None:
        began = time.perf_counter()
        self.level.prefill(feed(tokens[:-1], self.level))
        self._cached = len(tokens) - 1
        self.prefill_seconds += time.perf_counter() - began

    def _gather(
        self, values: list[int], rows: list[torch.Tensor], laws: list[torch.Tensor]
    ) -> Proposal:
        """The rows side by side in one buffer, which the next proposal overwrites."""
        k = len(rows)
        if k == 1:
            return Proposal(values, rows[0], laws=laws[0].view(1, 1, 2))
        if (
            self._rows is None
            or self._laws is None
            or self._rows.shape[1] < k
            or self._rows.dtype != rows[0].dtype
        ):
            self._rows = rows[0].new_empty(1, k, self.vocab_size)
            self._laws = laws[0].new_empty(1, k, 2)
        logits, law = self._rows[:, :k], self._laws[:, :k]
        torch.cat(rows, dim=1, out=logits)
        torch.cat(laws, dim=0, out=law[0])
        return Proposal(values, logits, laws=law)
