"""A small language model as drafter: the ordinary case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ops
from ..errors import ERROR_BITS, RequestError
from ..levels.base import Counts, InputBlock, Level, LevelAdapter
from .base import DraftBlock, DrafterCapabilities, DraftInput, RowBuffer


class DraftModel(LevelAdapter):
    """Draws tokens one after another from a level's processed distribution, for all rows of a
    batch.

    Args:
        level: the model; its cache belongs to this drafter from now on.
        vocab_size: ids from here on are cut off the logits before anything is drawn (a padded
            vocabulary, or one larger than the level's above). None: the level's own.
        sample: `ps.sample`, or what stands in for it.
    """

    def __init__(
        self,
        level: Level,
        vocab_size: int | None = None,
        sample: Callable[..., Any] = ops.sample,
    ) -> None:
        super().__init__(level)
        if vocab_size is not None:
            self.vocab_size = min(vocab_size, self.vocab_size)
        self.num_forward_passes = 0
        self._sample = sample

    @property
    def capabilities(self) -> DrafterCapabilities:
        can = super().capabilities
        return DrafterCapabilities(
            can.batches, can.device_lengths, can.reads_apart, keeps_lengths=can.keeps_lengths
        )

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`.

        Raises:
            RequestError: a row of logits has no distribution, and the host may read the tokens.
        """
        parameters = inputs.parameters.on(self.device).values()
        loop = _OnDevice(inputs) if inputs.eos is None else _OnHost(inputs)
        positions, level, rounds = loop.positions, inputs.level, loop.rounds
        vocab_size = min(self.vocab_size, inputs.vocab_size)
        cuts = vocab_size < self.input_vocab_size
        samples: list[ops.SampleResult] = []
        rows: RowBuffer | None = None
        places: Sequence[torch.Tensor] = ()
        tokens: torch.Tensor = inputs.tokens
        for i in range(inputs.most):
            counts, first = loop.counts(i)
            logits = self.forward(InputBlock(tokens, 1, counts, first)).logits
            if cuts:
                logits = logits[..., :vocab_size]
            if inputs.processors is not None:
                logits = loop.processed(logits)
            behind = logits.select(1, 0)
            drawn = self._sample(behind, *parameters, positions[i], level, rounds)
            samples.append(drawn)
            if inputs.wants_rows:
                if rows is None:
                    rows = _room(inputs.rows, inputs.most, logits)
                    places = rows.logits.unbind(1)
                # The level may write its logits again with the next pass.
                places[i].copy_(behind)
            if loop.ended(i, drawn):
                break
            tokens = loop.known(drawn.tokens).unsqueeze(1)
        self.num_forward_passes += len(samples)
        if rows is not None:
            assert rows.statistics is not None
            own = rows.statistics
            if own.shape[1] != len(samples):
                own = own[:, : len(samples)]
            torch.stack([s.statistics for s in samples], 1, out=own)
        tokens = torch.stack([s.tokens for s in samples], 1)
        return DraftBlock(tokens, status=loop.status(samples), rows=rows)


def _room(old: RowBuffer | None, most: int, logits: torch.Tensor) -> RowBuffer:
    """Room for `most` rows per request like those of `logits`, ``[B, 1, Vd]``."""
    batch, _, vocab = logits.shape
    if old is not None and old.statistics is not None:
        shape = old.logits.shape
        fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab
        if fits and old.logits.dtype == logits.dtype and old.logits.device == logits.device:
            return old
    # Zeros: what no row fills is handed to the operator as well, and must be harmless.
    statistics = torch.zeros(batch, most, 2, dtype=torch.int64, device=logits.device)
    return RowBuffer(logits.new_zeros(batch, most, vocab), statistics)


def _ahead(positions: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """The positions of the tokens that each of `most` passes draws."""
    steps = torch.arange(most, device=positions.device)
    return (steps[:, None] + positions).unbind()


class _OnDevice:
    """Which rows take part in each pass, without host synchronisation: every row that has a part
    draws all tokens."""

    def __init__(self, inputs: DraftInput) -> None:
        counts, positions, self.rounds = (
            torch.as_tensor(given, device=inputs.tokens.device)
            for given in (inputs.counts, inputs.positions, inputs.rounds)
        )
        self.positions = _ahead(positions, inputs.most)
        self._counts, self._first = counts, (counts - 1).clamp_min(0)
        self._one, self._zero = counts.clamp(max=1), torch.zeros_like(counts)

    def counts(self, place: int) -> tuple[Counts | None, Counts | None]:
        """Tokens that each row reads in pass `place`, and the last of them."""
        return (self._one, self._zero) if place else (self._counts, self._first)

    def ended(self, place: int, drawn: ops.SampleResult) -> bool:
        """Whether nobody draws another token."""
        return False

    def known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids to read: one that could not be drawn is -1, and the host has not read it yet."""
        return tokens.clamp_min(0)

    def status(self, samples: Sequence[ops.SampleResult]) -> torch.Tensor | None:
        return torch.stack([s.status for s in samples], 1)

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("processors need the host to see the tokens")


class _OnHost:
    """Which rows take part in each pass: those that have not drawn all their tokens, or an EOS."""

    def __init__(self, inputs: DraftInput) -> None:
        assert inputs.eos is not None
        self._inputs, self._eos = inputs, inputs.eos
        self._width = inputs.tokens.shape[1]
        self._read = [int(n) for n in inputs.counts]
        self._left = [int(n) for n in inputs.lengths]
        self._drawn: list[list[int]] = [[] for _ in self._left]
        self._unknown = False
        self.positions: Sequence[int] | tuple[torch.Tensor, ...]
        self.rounds: int | torch.Tensor
        if len(self._left) == 1:  # scalars cost the operator less than tensors
            first, self.rounds = int(inputs.positions[0]), int(inputs.rounds[0])
            self.positions = range(first, first + inputs.most)
        else:
            positions, self.rounds = (
                torch.as_tensor(given, device=inputs.tokens.device)
                for given in (inputs.positions, inputs.rounds)
            )
            self.positions = _ahead(positions, inputs.most)

    def counts(self, place: int) -> tuple[Counts | None, Counts | None]:
        if place == 0:
            read, width = self._read, self._width
            last = [max(n - 1, 0) for n in read]
            return (None, None) if min(read) == width else (read, last)
        return (None, None) if all(self._left) else ([min(n, 1) for n in self._left], None)

    def ended(self, place: int, drawn: ops.SampleResult) -> bool:
        eos, left, own = self._eos, self._left, self._drawn
        tokens: list[int] = drawn.tokens.tolist()
        self._unknown = min(tokens) < 0
        if self._unknown:
            self._raise(drawn, place)
        for b, token in enumerate(tokens):
            if left[b]:
                own[b].append(token)
                left[b] = 0 if token in eos[b] else left[b] - 1
        return not any(left)

    def known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids to read: a row without a part may have drawn none."""
        return tokens.clamp_min(0) if self._unknown else tokens

    def status(self, samples: Sequence[ops.SampleResult]) -> None:
        """Errors have been raised."""

    def _raise(self, drawn: ops.SampleResult, place: int) -> None:
        inputs = self._inputs
        for b, bits in enumerate(drawn.status.tolist()):
            if self._left[b] and bits & ERROR_BITS:
                at = int(inputs.positions[b]) + place
                raise RequestError(inputs.requests[b], inputs.level, at, bits)

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        inputs = self._inputs
        assert inputs.processors is not None
        assert inputs.text is not None
        out = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
        for b, (left, drawn) in enumerate(zip(self._left, self._drawn, strict=True)):
            if left:
                text = inputs.text(b)
                prefix = torch.cat([text, text.new_tensor(drawn)]).to(logits.device)
                out[b] = inputs.processors.apply(logits[b], prefix, inputs.requests[b])
        return out
