"""What a chain keeps about one request of a batch, and about the laws that wait to be judged.

`Row.tokens` is one list: prompt, committed tokens, then what is pending for level 1, for level 2,
and so on. Each level remembers how many leading tokens of it its cache holds. To judge its m
pending tokens a level reads the tokens from there to the end and keeps the last m + 1 rows of
logits. After a of them were accepted the list is cut behind the a-th and the correction or bonus
token appended, which stands in no cache yet; every cache below is cut to what is still true.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._C import Scheduler
from ..drafters import Context, Drafter
from ..sampling import Sampling
from ..stats import Stats
from ..tensors import moved


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


class _Piece(NamedTuple):
    """Where the rows of some waiting tokens are: ``chunk.logits[row, start : start + size]``. No
    chunk: the tokens were proposed deterministically, so their law is one-hot."""

    chunk: Chunk | None
    row: int
    start: int
    size: int


class PendingLaws:
    """The laws that the tokens waiting for one level were drawn from: q, for every one of them
    (contract C1).

    They stay where the level below left them; they are laid side by side only where a block was
    filled by more than one round, or at different times in different rows, or where that level may
    write over them before they are used (`hold`).
    """

    __slots__ = ("_buffer", "_device", "_laws", "_pieces")

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._pieces: list[list[_Piece]] = [[] for _ in range(slots)]
        self._buffer: torch.Tensor | None = None  # [B, W, Vd], grows to the largest block
        self._laws: torch.Tensor | None = None  # [B, W, 2]

    def chunk(self, logits: torch.Tensor, laws: torch.Tensor | None) -> Chunk:
        """`logits` ``[B, e, Vd]`` and `laws` where the level that judges them wants them."""
        return Chunk(self._moved(logits), None if laws is None else self._moved(laws))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return moved(tensor if tensor.stride(-1) == 1 else tensor.contiguous(), self._device)

    def add(self, slot: int, chunk: Chunk | None, count: int, row: int | None = None) -> None:
        """`count` more tokens of `slot`; their rows are the first of ``chunk.logits[row]``, where
        `row` is `slot` by default. No chunk: they were proposed deterministically."""
        if count:
            self._pieces[slot].append(_Piece(chunk, slot if row is None else row, 0, count))

    def clear(self, slot: int) -> None:
        self._pieces[slot].clear()

    def select(self, slots: Sequence[int]) -> None:
        """Keep these slots, in that order."""
        self._pieces = [self._pieces[slot] for slot in slots]
        # Other slots' rows are there: what is held in it is copied when it is used.
        self._buffer = self._laws = None

    def hold(self, slots: Sequence[int]) -> None:
        """What waits in `slots` now is used later than the next pass of the level it comes from,
        which may write over it: copy it."""
        for slot in slots:
            waiting = sum(piece.size for piece in self._pieces[slot])
            chunks = [piece.chunk for piece in self._pieces[slot] if piece.chunk is not None]
            if chunks:
                self._lay(slot, self._room(chunks, len(self._pieces), waiting))

    def take(self, group: Sequence[tuple[Row, int]], width: int) -> Chunk | None:
        """Rows ``[B, width, Vd]`` of the tokens that wait in the slots of `group`, valid until the
        next call; forgets them. None: all of them were proposed deterministically. What is there
        for other tokens and slots means nothing."""
        batch = len(self._pieces)
        # Where the temperature is 0 nobody reads them.
        slots = [row.slot for row, _ in group if not row.sampling.greedy]
        pieces = [piece for slot in slots for piece in self._pieces[slot]]
        chunks = [piece.chunk for piece in pieces if piece.chunk is not None]
        taken: Chunk | None = None
        if chunks:
            first = chunks[0]
            in_place = first.logits.shape[0] == batch and first.logits.shape[1] >= width
            if in_place and all(
                own.chunk is first and (own.row, own.start) == (slot, 0) and len(waiting) == 1
                for slot in slots
                for waiting in (self._pieces[slot],)
                for own in waiting
            ):
                taken = Chunk(
                    first.logits[:, :width], None if first.laws is None else first.laws[:, :width]
                )
            else:
                taken = self._side_by_side(group, slots, chunks, width)
        for row, _ in group:
            self._pieces[row.slot] = []
        return taken

    def _side_by_side(
        self,
        group: Sequence[tuple[Row, int]],
        slots: Sequence[int],
        chunks: Sequence[Chunk],
        width: int,
    ) -> Chunk:
        # A deterministic token beside sampled ones gets a row of its own, which is one-hot.
        ids = {row.slot: row.tokens[len(row.tokens) - count :] for row, count in group}
        last = -1
        for slot in slots:
            at = 0
            for piece in self._pieces[slot]:
                if piece.chunk is None:
                    last = max(last, *ids[slot][at : at + piece.size])
                at += piece.size
        buffer = self._room(chunks, len(self._pieces), width, last + 1)
        known = True
        for slot in slots:
            at = 0
            for piece in self._lay(slot, buffer):
                if piece.chunk is None:
                    rows = buffer.logits[slot, at : at + piece.size]
                    rows.fill_(-math.inf)
                    proposed = torch.tensor(ids[slot][at : at + piece.size], device=rows.device)
                    rows.scatter_(1, proposed[:, None], 0.0)
                known = known and piece.chunk is not None and piece.chunk.laws is not None
                at += piece.size
        logits, laws = buffer
        return Chunk(logits[:, :width], laws[:, :width] if known and laws is not None else None)

    def _lay(self, slot: int, buffer: Chunk) -> list[_Piece]:
        """Copies what waits in `slot` into its row of the buffer, unless it is there."""
        laid, at = [], 0
        for chunk, row, start, size in self._pieces[slot]:
            if chunk is not None and chunk.logits is not buffer.logits:
                own, end = chunk.logits[row, start : start + size], at + size
                vocab = own.shape[1]
                buffer.logits[slot, at:end, :vocab] = own
                laws = buffer.laws
                if vocab < buffer.logits.shape[2]:
                    # The unit of a law's mass depends on the width of its row.
                    buffer.logits[slot, at:end, vocab:] = -math.inf
                    laws = None
                if laws is None or chunk.laws is None:
                    laws = None
                else:
                    laws[slot, at:end] = chunk.laws[row, start : start + size]
                chunk, row, start = Chunk(buffer.logits, laws), slot, at
            laid.append(_Piece(chunk, row, start, size))
            at += size
        self._pieces[slot] = laid
        return laid

    def _room(self, chunks: Sequence[Chunk], batch: int, width: int, vocab: int = 0) -> Chunk:
        """The buffer, large enough for these chunks and precise enough for each of them. What a
        smaller one holds is copied from there."""
        dtype = functools.reduce(torch.promote_types, (chunk.logits.dtype for chunk in chunks))
        vocab = max(vocab, *(chunk.logits.shape[2] for chunk in chunks))
        logits, laws = self._buffer, self._laws
        if logits is not None:
            width, vocab = max(width, logits.shape[1]), max(vocab, logits.shape[2])
            dtype = torch.promote_types(dtype, logits.dtype)
        shape = (batch, width, vocab)
        if logits is None or logits.shape != shape or logits.dtype != dtype:
            # Zeros: what no row fills is handed to the operator as well, and must be harmless.
            logits = self._buffer = torch.zeros(shape, dtype=dtype, device=self._device)
            laws = self._laws = torch.zeros(batch, width, 2, dtype=torch.int64, device=self._device)
        return Chunk(logits, laws)


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> tuple[list[int], bool]:
    """Tokens up to and including the first EOS, and whether there was one (contract C2: the EOS
    is kept)."""
    if eos and not eos.isdisjoint(tokens):
        for i, token in enumerate(tokens):
            if token in eos:
                return list(tokens[: i + 1]), True
    return list(tokens), False
