"""The state of one request while a chain works on it, and the round that moves it on.

Everything that changes between tokens lives here; the chain itself only holds what its requests
share.

Bookkeeping. `tokens` is one list: prompt, committed tokens, then what is pending for level 1, for
level 2, and so on. Each level remembers how many leading tokens its cache holds. To judge its m
pending tokens a level reads the tokens from there to the end and keeps the last m + 1 rows of
logits. After a of them were accepted the list is cut behind the a-th and the correction or bonus
token appended, which stands in no cache yet; every cache below is cut to what is still true.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import ops
from ._C import Scheduler, StepKind
from .drafters import Context
from .errors import raise_for_status
from .levels import feed
from .sampling import Sampling
from .stats import LevelStats, Stats

if TYPE_CHECKING:
    from .chain import Chain


class PendingLaws:
    """The laws that the tokens waiting for one level were drawn from: q, for every one of them
    (contract C1).

    Chunks are views of the logits of the level below; they are laid side by side only where a
    block was filled by more than one round.
    """

    __slots__ = ("_buffer", "_chunks", "_device", "_law_chunks", "_laws")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[torch.Tensor] = []  # each [1, e, Vd]
        self._law_chunks: list[torch.Tensor] = []  # each [1, e, 2]
        self._buffer: torch.Tensor | None = None  # [1, W, Vd], grows to the largest block
        self._laws: torch.Tensor | None = None  # [1, W, 2]

    def add(self, logits: torch.Tensor | None, laws: torch.Tensor | None) -> None:
        """Rows ``[1, e, Vd]`` of e more tokens and their laws ``[1, e, 2]``; None for a
        deterministic proposal."""
        if logits is not None:
            self._chunks.append(
                logits if logits.device == self._device else logits.to(self._device)
            )
        if laws is not None:
            self._law_chunks.append(laws if laws.device == self._device else laws.to(self._device))

    def take(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """All rows ``[1, m, Vd]`` and laws ``[1, m, 2]``, valid until the next call; forgets
        them."""
        chunks, laws = self._chunks, self._law_chunks
        self._chunks, self._law_chunks = [], []
        if not chunks:
            return None, None
        if len(chunks) == 1:
            return chunks[0], laws[0] if laws else None
        count = sum(chunk.shape[1] for chunk in chunks)
        first = chunks[0]
        if self._buffer is None or self._laws is None or self._buffer.shape[1] < count:
            self._buffer = first.new_empty(1, count, first.shape[2])
            self._laws = laws[0].new_empty(1, count, 2)
        rows = torch.cat(chunks, dim=1, out=self._buffer[:, :count])
        return rows, torch.cat(laws, dim=1, out=self._laws[:, :count])

    def clear(self) -> None:
        self._chunks.clear()
        self._law_chunks.clear()


class Request:
    """One prompt on its way through a chain.

    Args:
        chain: the levels and the rule.
        prompt: token ids, at least one.
        max_new_tokens: upper bound of new tokens, >= 0.
        sampling: parameters, the same on every level.
        seed: keys the draws; reduced modulo 2**64.
        eos: ids that end the text.
    """

    def __init__(
        self,
        chain: Chain,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        eos: frozenset[int],
    ) -> None:
        self.chain = chain
        self.tokens = prompt
        self.sampling = sampling
        self.seed = seed
        self.eos = eos
        self.stats = Stats(
            [LevelStats(name) for name in chain.names], num_prompt_tokens=len(prompt)
        )
        count = len(chain.levels)
        self._cached: list[int | None] = [
            None
        ] * count  # tokens in each level's cache; None: not prefilled
        self._rounds = [0] * count
        self._pending = [PendingLaws(chain.device(i)) for i in range(count)]
        # A chain of one level is a scheduler of two whose drafter is never asked: a window of 0.
        self._scheduler = Scheduler(chain.window or [0])
        self._scheduler.start(max_new_tokens)
        self._context = Context(self.tokens, sampling=sampling, seed=seed, level=count + 1, eos=eos)

    @torch.inference_mode()
    def advance(self) -> list[int]:
        """Rounds until the target commits tokens: these, or nothing when the text is complete."""
        began = time.perf_counter()
        prefilled = self.stats.prefill_seconds
        committed: list[int] = []
        scheduler = self._scheduler
        while not committed:
            step = scheduler.next()
            if step.kind == StepKind.DRAFT:
                self._draft(step.count)
            elif step.kind == StepKind.VERIFY:
                emitted = self._verify(step.level - 1, step.count)
                if step.level == 1:
                    committed = emitted
            else:
                break
        stats = self.stats
        stats.num_new_tokens += len(committed)
        stats.decode_seconds += time.perf_counter() - began - (stats.prefill_seconds - prefilled)
        return committed

    def _draft(self, count: int) -> None:
        """One drafting round: up to `count` tokens for the lowest level that verifies."""
        chain, context = self.chain, self._context
        drafter, stats = chain.drafter, self.stats.levels[-1]
        assert drafter is not None
        began = time.perf_counter()
        passes, prefill = chain.drafter_counters()
        proposal = drafter.propose(context, count)
        more_passes, more_prefill = chain.drafter_counters()
        tokens = chain.check_proposal(proposal, count)
        context.round += 1
        kept, ended = cut_at_eos(tokens, self.eos)
        self.tokens += kept
        context.valid = len(self.tokens)
        if proposal.logits is not None and not self.sampling.greedy:
            whole = len(kept) == len(tokens)
            rows = proposal.logits if whole else proposal.logits[:, : len(kept)]
            laws = (
                proposal.laws if whole or proposal.laws is None else proposal.laws[:, : len(kept)]
            )
            self._pending[-1].add(rows, laws)
        stats.num_forward_passes += more_passes - passes
        stats.num_proposed_tokens += len(tokens)
        stats.prefill_seconds += more_prefill - prefill
        stats.seconds += time.perf_counter() - began - (more_prefill - prefill)
        # Fewer than asked for, or none, closes the block: the level above judges what there is.
        self._scheduler.report(len(chain.names), len(kept), ended)

    def _verify(self, index: int, count: int) -> list[int]:
        """Level `index` (from 0) judges its `count` pending tokens. Returns what it emits, cut
        behind an EOS."""
        chain, tokens, stats = self.chain, self.tokens, self.stats.levels[index]
        level, sampling = chain.levels[index], self.sampling
        began = time.perf_counter()
        have = self._cached[index]
        if have is None:
            have = self._prefill(index, len(tokens) - count - 1)
            now = time.perf_counter()
            stats.prefill_seconds += now - began
            began = now
        start = len(tokens) - count  # absolute position of the first pending token
        fed = feed(tokens[have:], level)
        logits = level.forward(fed, count + 1)
        self._cached[index] = len(tokens)
        vocab = chain.vocab_sizes[index]
        if logits.shape[-1] > vocab:
            logits = logits[..., :vocab]
        draft_logits, draft_laws = self._pending[index].take()
        r = ops.verify(
            logits,
            fed[:, fed.shape[1] - count :],
            draft_logits,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=self.seed,
            position=start,
            level=index + 1,
            round=self._rounds[index],
            rule=chain.rule,
            draft_laws=draft_laws,
        )
        self._rounds[index] += 1
        accepted = int(r.num_accepted)
        if int(r.status):
            raise_for_status(r.status, level=index + 1, position=start, num_accepted=r.num_accepted)
        kept, ended = cut_at_eos(r.tokens[0, : accepted + 1].tolist(), self.eos)
        emitted = len(kept)
        accepted = min(accepted, emitted)
        if index > 0 and not sampling.greedy:
            self._pending[index - 1].add(logits[:, :emitted], r.laws[:, :emitted])
        tokens[start:] = kept
        self._cut_caches(index, start + accepted)
        self._scheduler.report(index + 1, emitted, ended)
        stats.num_forward_passes += 1
        stats.judged(count, accepted, emitted)
        stats.seconds += time.perf_counter() - began
        return kept

    def _prefill(self, index: int, length: int) -> int:
        """Read the first `length` tokens, on a level's first use: all but those its first rows
        stand behind."""
        level = self.chain.levels[index]
        level.prefill(feed(self.tokens[:length], level))
        return length

    def _cut_caches(self, index: int, valid: int) -> None:
        """Level `index` has judged: of the tokens the caches from it downwards hold, the first
        `valid` still stand."""
        cached, levels = self._cached, self.chain.levels
        for i in range(index, len(levels)):
            have = cached[i]
            if have is not None and have > valid:
                levels[i].rollback([valid])
                cached[i] = valid
        if valid < self._context.valid:
            self._context.valid = valid


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[list[int], bool]:
    """Tokens up to and including the first EOS, and whether there was one (contract C2: the EOS
    is kept)."""
    if eos and not eos.isdisjoint(tokens):
        for i, token in enumerate(tokens):
            if token in eos:
                return list(tokens[: i + 1]), True
    return list(tokens), False
