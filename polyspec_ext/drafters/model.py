"""A small language model as drafter: the ordinary case."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..errors import ERROR_BITS, RequestError
from ..levels import Level
from ..returned import call, require_logits
from ..tensors import Parameters, feed, integers
from .base import Context, Proposal

if TYPE_CHECKING:
    from ..integrations.processors import LawProcessors


@dataclass(slots=True)
class Draft:
    """What one drafting round brought, for B rows.

    Attributes:
        counts: tokens of each row.
        tokens: the ids, ``[counts[b]]`` each, or None: the host has not read them yet.
        drawn: ``[B, k]`` int64 on the drafter's device; -1 where a row of logits had no law. Of
            no tokens where the host has read them.
        status: ``[B, k]`` int32, of `ps.sample`, for the same tokens.
        logits: ``[B, k, Vd]``, the rows they were drawn from, or None: nobody will ask. Valid until
            the next round.
        laws: ``[B, k, 2]`` int64, as `ps.sample` gave them; None with `logits`.
    """

    counts: list[int]
    tokens: list[list[int]] | None
    drawn: torch.Tensor
    status: torch.Tensor
    logits: torch.Tensor | None
    laws: torch.Tensor | None


class DraftModel:
    """Draws k tokens one after another from a level's processed law, for all rows of a batch.

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
        self.processors: LawProcessors | None = None
        # Whether tokens are looked at as they are drawn: for nothing on the CPU, where it saves
        # drafting past an EOS; elsewhere it would have the host wait for the device.
        self.looks = self.device.type == "cpu"
        self._cached: list[int] | None = None
        self._rows: torch.Tensor | None = None  # [B, k, Vd], reused by every round

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: without what belongs to a batch."""
        return {**self.__dict__, "processors": None, "_cached": None, "_rows": None}

    @property
    def cached(self) -> list[int] | None:
        """Leading tokens of each context whose keys and values the level holds; None: no batch
        yet. Set where passes were done without this drafter (`device_rounds`)."""
        return self._cached

    @cached.setter
    def cached(self, lengths: Sequence[int]) -> None:
        self._cached = list(lengths)

    def forget(self) -> None:
        """Another batch begins: `prefill` it, or its first round will."""
        self._cached = None

    def select(self, slots: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        if self._cached is not None:
            self._cached = [self._cached[slot] for slot in slots]
            call(self.name, self.level, "select", slots)

    def propose(self, context: Context, k: int) -> Proposal:
        """`k` tokens, fewer only after an EOS. Raises RequestError where a row of logits has no
        law."""
        if context.valid == 0:
            self.forget()
        parameters = Parameters([context.sampling], [context.seed])
        draft = self.draft([context], [k], parameters)
        if draft.tokens is None:
            raise_for_draft(draft.status.tolist(), [context], [len(context.tokens)], [k])
            values = draft.drawn[0].tolist()
        else:
            values = draft.tokens[0]
        return Proposal(values, draft.logits, laws=draft.laws)

    def draft(
        self, contexts: Sequence[Context], counts: Sequence[int], parameters: Parameters
    ) -> Draft:
        """Up to ``counts[b]`` tokens for row b; 0 where a row has no part in this round.

        A row ends early behind an EOS where the tokens can be looked at for nothing, on the CPU; on
        another device nothing waits for it.

        Raises:
            RequestError: a row of logits has no law, and the tokens were looked at.
        """
        if self._cached is None:
            self.prefill(contexts)
        cached = self._cached
        assert cached is not None
        self._cut(contexts)
        look = self.looks or self.processors is not None
        batch, device = len(contexts), self.device
        arguments = parameters.on(device)
        ends = [len(context.tokens) for context in contexts]
        rounds = integers([context.round for context in contexts], device)
        left = list(counts)  # tokens still to draw, by row
        values: list[list[int]] = [[] for _ in contexts]
        fed, given = feed(
            [
                context.tokens[have:] if count else []
                for context, have, count in zip(contexts, cached, counts, strict=True)
            ],
            self.level,
        )
        keep, most = not parameters.greedy, max(counts)
        samples: list[ops.SampleResult] = []
        for i in range(most):
            if given is None:
                logits = self.level.forward(fed, 1)
            else:
                last = [max(n - 1, 0) for n in given]
                logits = self.level.forward(fed, 1, given, last)  # type: ignore[call-arg]
            self.num_forward_passes += 1
            require_logits(self.name, logits, batch, 1, self.level.vocab_size, device)
            if logits.shape[2] > self.vocab_size:
                logits = logits[..., : self.vocab_size]
            if self.processors is not None:
                logits = self._processed(logits, contexts, values, left)
            s = ops.sample(
                logits[:, 0],
                arguments["temperature"],
                arguments["top_k"],
                arguments["top_p"],
                arguments["min_p"],
                arguments["seed"],
                integers([end + i for end in ends], device),
                contexts[0].level,
                rounds,
            )
            samples.append(s)
            if keep and most > 1:
                self._keep(logits, i, most)
            taken = left
            left = [max(n - 1, 0) for n in left]
            if look:
                read = s.tokens.tolist()
                if min(read) < 0:
                    bits = s.status[:, None].tolist()
                    raise_for_draft(bits, contexts, [end + i for end in ends], taken)
                for b, context in enumerate(contexts):
                    if taken[b]:
                        values[b].append(read[b])
                        if read[b] in context.eos:
                            left[b] = 0
            if not any(left):
                break
            # A token that could not be drawn is -1; until that is looked at it must stay an id.
            fed = (s.tokens if look else s.tokens.clamp_min(0)).view(batch, 1)
            given = None if all(left) else [1 if n else 0 for n in left]
            if look and given is not None:
                fed = fed.clamp_min(0)
        drawn = [len(own) for own in values] if look else list(counts)
        for b, (end, count) in enumerate(zip(ends, drawn, strict=True)):
            if count:  # the last token drawn was fed to nobody yet
                cached[b] = end + count - 1
        unread, none = ([] if look else samples), fed.new_empty(batch, 0)
        rows = laws = None
        if keep:
            rows = logits if most == 1 or self._rows is None else self._rows[:, : len(samples)]
            laws = torch.stack([s.laws for s in samples], 1)
        return Draft(
            drawn,
            values if look else None,
            torch.stack([s.tokens for s in unread], 1) if unread else none,
            torch.stack([s.status for s in unread], 1) if unread else none,
            rows,
            laws,
        )

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Read all tokens of a new batch's contexts but the last, whose logits are wanted."""
        began = time.perf_counter()
        prompts = [context.tokens[:-1] for context in contexts]
        fed, given = feed(prompts, self.level)
        call(self.name, self.level, "prefill", fed, *(() if given is None else (given,)))
        self._cached = [len(prompt) for prompt in prompts]
        self.prefill_seconds += time.perf_counter() - began

    def _cut(self, contexts: Sequence[Context]) -> None:
        """The level forgets what no longer stands."""
        cached = self._cached
        assert cached is not None
        wanted = [
            min(have, context.valid) if context.valid else have
            for have, context in zip(cached, contexts, strict=True)
        ]
        if wanted != cached:
            call(self.name, self.level, "rollback", wanted)
            cached[:] = wanted

    def _processed(
        self,
        logits: torch.Tensor,
        contexts: Sequence[Context],
        values: list[list[int]],
        left: list[int],
    ) -> torch.Tensor:
        assert self.processors is not None
        out = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
        for b, context in enumerate(contexts):
            if left[b]:
                prefix = torch.tensor(context.tokens + values[b], device=logits.device)
                out[b] = self.processors.apply(logits[b], prefix, context.request)
        return out

    def _keep(self, logits: torch.Tensor, i: int, k: int) -> None:
        """Copies the rows of pass `i` of `k` side by side with those before, as the next pass of
        the level may write over them, into a buffer that the next round overwrites."""
        batch, _, vocab = logits.shape
        rows = self._rows
        if rows is None or rows.shape[0] != batch or rows.shape[1] < k or rows.shape[2] != vocab:
            rows = self._rows = logits.new_empty(batch, k, vocab)
        elif rows.dtype != logits.dtype:  # what a wider dtype holds is exact
            rows = self._rows = rows.to(torch.promote_types(rows.dtype, logits.dtype))
        rows[:, i] = logits[:, 0]


def raise_for_draft(
    status: Sequence[Sequence[int]],
    contexts: Sequence[Context],
    positions: Sequence[int],
    counts: Sequence[int],
) -> None:
    """Raises RequestError for the first token of the round that could not be drawn.

    Args:
        status: ``[B][k]`` status bits, of the tokens at ``positions[b]`` and behind.
        counts: tokens of each row; what follows them took no part.
    """
    for own, context, position, count in zip(status, contexts, positions, counts, strict=True):
        for i, bits in enumerate(own[:count]):
            if bits & ERROR_BITS:
                raise RequestError(context.request, context.level, position + i, bits)
