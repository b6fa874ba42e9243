"""What a chain keeps about one request of a batch, and about the laws that wait to be judged.

`Row.tokens` is one list: prompt, committed tokens, then what is pending for level 1, for level 2,
and so on. Each level remembers how many leading tokens of it its cache holds. To judge its m
pending tokens a level reads the tokens from there to the end and keeps the last m + 1 rows of
logits. After a of them were accepted the list is cut behind the a-th and the correction or bonus
token appended, which stands in no cache yet; every cache below is cut to what is still true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._C import Scheduler
from .drafters import Context, Drafter
from .sampling import Sampling
from .stats import Stats


class Row:
    """One request. `slot` is its place in the caches, which changes when neighbours leave.

    Attributes:
        number: its index in the batch, for messages.
        tokens: see above. An id below 0 is one that the host has not read yet (`batch.ids_of`).
        cached: leading tokens in the cache of each level that verifies.
        rounds: verifications of each level so far, which key the draws (contract C3).
        logprobs: of the committed tokens, under the target's processed law.
        drafter: its own, where the chain's drafter serves one request at a time.
    """

    __slots__ = (
        "cached",
        "context",
        "drafter",
        "ended",
        "eos",
        "logprobs",
        "max_new_tokens",
        "number",
        "rounds",
        "sampling",
        "scheduler",
        "seed",
        "slot",
        "stats",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        prompt: list[int],
        window: Sequence[int],
        rounds: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        eos: frozenset[int],
        stats: Stats,
        drafter: Drafter | None,
    ) -> None:
        levels = len(stats.levels)
        self.number = self.slot = number
        self.tokens = prompt
        self.sampling, self.seed, self.eos, self.stats = sampling, seed, eos, stats
        self.drafter = drafter
        verifying = max(1, levels - 1)
        self.cached, self.rounds = [0] * verifying, [0] * verifying
        # A chain of one level is a scheduler of two whose drafter is never asked: a window of 0.
        self.scheduler = Scheduler(list(window) or [0], [*rounds, 0])
        self.max_new_tokens = max_new_tokens
        self.scheduler.start(max_new_tokens)
        self.context = Context(prompt, 0, sampling, seed, verifying + 1, eos=eos, request=number)
        self.logprobs: list[float] = []
        self.ended = self.scheduler.done

    @property
    def committed(self) -> int:
        """Tokens that stand for good: the prompt's and the target's."""
        return self.stats.num_prompt_tokens + self.stats.num_new_tokens

    @property
    def room(self) -> int:
        """Tokens that the target may still emit."""
        return self.max_new_tokens - int(self.scheduler.committed)

    def cut(self, index: int, valid: int) -> set[int]:
        """Level `index` has judged: of the tokens the caches from it downwards hold, the first
        `valid` still stand. Returns the levels that hold more."""
        over = {i for i in range(index, len(self.cached)) if self.cached[i] > valid}
        for i in over:
            self.cached[i] = valid
        self.context.valid = min(self.context.valid, valid)
        return over


class Chunk(NamedTuple):
    """Rows of logits that one round of the level below produced, ``[B, e, Vd]``, and their laws,
    ``[B, e, 2]`` or None."""

    logits: torch.Tensor
    laws: torch.Tensor | None

    def spread(self, slots: int) -> Chunk:
        """A chunk of one row, as every row's of a batch."""
        laws = self.laws
        return Chunk(
            self.logits.expand(slots, -1, -1),
            laws if laws is None else laws.expand(slots, -1, -1),
        )


class PendingLaws:
    """The laws that the tokens waiting for one level were drawn from: q, for every one of them
    (contract C1).

    They stay where the level below left them; they are laid side by side only where a block was
    filled by more than one round, or at different times in different rows.
    """

    __slots__ = ("_buffer", "_device", "_laws", "_pieces")

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        # Per slot: the chunk, its row there and how many of its tokens wait.
        self._pieces: list[list[tuple[Chunk, int, int]]] = [[] for _ in range(slots)]
        self._buffer: torch.Tensor | None = None  # [B, W, Vd], grows to the largest block
        self._laws: torch.Tensor | None = None  # [B, W, 2]

    def chunk(self, logits: torch.Tensor, laws: torch.Tensor | None) -> Chunk:
        """`logits` ``[B, e, Vd]`` and `laws` where the level that judges them wants them."""
        if logits.device != self._device:
            logits = logits.to(self._device, non_blocking=True)
        if laws is not None and laws.device != self._device:
            laws = laws.to(self._device, non_blocking=True)
        return Chunk(logits, laws)

    def add(self, slot: int, chunk: Chunk, count: int) -> None:
        """`count` more tokens of `slot`; their rows are the first of ``chunk.logits[slot]``."""
        self._pieces[slot].append((chunk, slot, count))

    def clear(self, slot: int) -> None:
        self._pieces[slot].clear()

    def select(self, slots: Sequence[int]) -> None:
        """Keep these slots, in that order."""
        self._pieces = [self._pieces[slot] for slot in slots]

    def take(self, slots: Sequence[int], width: int) -> Chunk | None:
        """Rows ``[B, width, Vd]`` of the tokens that wait in `slots`, valid until the next call;
        forgets them. None: the proposals were deterministic. Other rows mean nothing."""
        batch = len(self._pieces)
        pieces = [(slot, self._pieces[slot]) for slot in slots]
        for slot in slots:
            self._pieces[slot] = []
        first = next((own[0][0] for _, own in pieces if own), None)
        if first is None:
            return None
        if first.logits.shape[0] == batch and all(
            len(own) == 1 and own[0][0] is first and own[0][1] == slot
            for slot, own in pieces
            if own
        ):
            logits, laws = first
            return Chunk(logits[:, :width], laws if laws is None else laws[:, :width])
        buffer, laws = self._room(first, batch, width)
        for slot, own in pieces:
            at = 0
            for chunk, row, count in own:
                buffer[slot, at : at + count] = chunk.logits[row, :count]
                if laws is not None and chunk.laws is not None:
                    laws[slot, at : at + count] = chunk.laws[row, :count]
                at += count
        return Chunk(buffer, laws)

    def _room(
        self, like: Chunk, batch: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vocab = like.logits.shape[2]
        old = self._buffer
        if old is None or old.shape[0] != batch or old.shape[1] < width or old.shape[2] != vocab:
            # Zeros: what no row fills is handed to the operator as well, and must be harmless.
            old = self._buffer = like.logits.new_zeros(batch, width, vocab)
            self._laws = None if like.laws is None else like.laws.new_zeros(batch, width, 2)
        return old[:, :width], None if self._laws is None else self._laws[:, :width]


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[list[int], bool]:
    """Tokens up to and including the first EOS, and whether there was one (contract C2: the EOS
    is kept)."""
    if eos and not eos.isdisjoint(tokens):
        for i, token in enumerate(tokens):
            if token in eos:
                return list(tokens[: i + 1]), True
    return list(tokens), False
