"""Results of a chain: all tokens at once, or a stream of committed tokens or text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import rooms
from .runtime.batch import Batch
from .runtime.rows import Row
from .sampling import Alternatives, likeliest
from .stats import Stats


class TargetTokenizer:
    """The tokenizer beside the weights of a target, loaded at first use."""

    def __init__(self, level: object, name: str) -> None:
        self._level, self._name, self._found = level, name, None

    def find(self) -> Any:
        """Return the tokenizer, or None."""
        find = getattr(self._level, "tokenizer", None)
        if self._found is None and callable(find):
            self._found = find()
        return self._found

    def require(self, what: str) -> Any:
        """Return the tokenizer, or raise a ValueError that begins with `what`."""
        if self.find() is None:
            raise ValueError(
                f"{what}: expected a target with a tokenizer beside its weights, given {self._name}"
            )
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy` and `pickle` without the level, since weights are large."""
        return {"_level": None, "_name": self._name, "_found": self.find()}


@dataclass(slots=True)
class Output:
    """The result of `Chain.generate`.

    Attributes:
        sequences: ``[B, N]`` int64, prompts and new tokens, short rows padded at their end.
        stats: statistics of the whole batch.
        requests: statistics of each row. Times are of the passes that the row took part in.
        logprobs: by row, log-probability of each new token under the target's processed
            distribution. At temperature 0 they are of temperature 1, like `alternatives`, and come
            with these only.
        seeds: seed of each row; as `seed` of the same call they give the same tokens. If no row
            samples, the seeds of seed 0.
        new_tokens: new tokens of each row, without padding, up to the end of a stop string.
        tokenizer: the target's, for `text`.
        finish_reasons: for each row "stop" at an end-of-text id or a stop string, else "length".
        alternatives: for each new token of each row the likeliest ids with log-probabilities
            (`sampling.likeliest`), as many as the `logprobs` of `Chain.generate`.
        stopped_text: text of each row before its stop string; None: no stop strings.
    """

    sequences: torch.Tensor
    stats: Stats
    requests: list[Stats] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list, repr=False)
    tokenizer: TargetTokenizer | None = field(default=None, repr=False, compare=False)
    finish_reasons: list[str] = field(default_factory=list)
    alternatives: list[list[Alternatives]] = field(default_factory=list, repr=False)
    stopped_text: list[str] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Return a line per row, then the statistics."""
        rows = [
            f"  row {name}: {count} tokens, {ended}, seed {seed}"
            for name, (count, ended, seed) in self._rows()
        ]
        size = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
        return "\n".join([f"Output of {size}", *rows, repr(self.stats)])

    def _repr_html_(self) -> str:
        heads = ("new tokens", "ended by", "seed")
        return rooms.columns.html("row", heads, self._rows(), self.stats.speed)

    def _rows(self) -> list[tuple[str, Sequence[str]]]:
        shown = zip(self.new_tokens, self.finish_reasons, self.seeds, strict=False)
        return [
            (str(number), (str(len(tokens)), ended, str(seed)))
            for number, (tokens, ended, seed) in enumerate(shown)
        ]

    @property
    def text(self) -> list[str]:
        """The new tokens of each row as text, without special tokens and stop string.

        Raises:
            ValueError: no tokenizer lies beside the target's weights.
        """
        if self.stopped_text is not None:
            return list(self.stopped_text)
        tokenizer = (self.tokenizer or TargetTokenizer(None, "none")).require("text")
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in self.new_tokens]


def alternatives(row: Row, logits: torch.Tensor, count: int) -> list[Alternatives]:
    """Return the likeliest ids of the latest tokens of a row (`sampling.likeliest`); at temperature
    0 set the log-probabilities of the tokens, which are the likeliest, to the values of these.

    Args:
        logits: target's processed logits ``[e, V]`` of the tokens.
        count: number of ids for each token, at least 1.
    """
    found = likeliest(logits, row.request.sampling, count)
    if row.request.sampling.greedy:
        row.logprobs[len(row.logprobs) - len(found) :] = [best[0][1] for best in found]
    return found


class StoppedRow:
    """A row of a batch up to its stop string: the target may commit tokens after it. The `reader`
    decodes the new tokens; None: no stop strings. To be built before the batch begins."""

    def __init__(self, batch: Batch, number: int, reader: rooms.chat.StopStrings | None) -> None:
        self.reader, self._batch, self._row = reader, batch, batch.rows[number]
        self._begin = len(self._row.tokens)

    def read(self) -> None:
        """Read the committed tokens, and end the row at a stop string."""
        reader, row = self.reader, self._row
        if reader is None or self.stops():
            return
        for token in row.tokens[self._begin + reader.num_tokens :]:
            reader.add(token)
        if row.ended:
            reader.rest()
        if self.stops():
            self._batch.end(row, len(row.tokens) - self._begin - reader.num_tokens)

    def stops(self) -> bool:
        """Return whether a stop string has been read."""
        return self.reader is not None and self.reader.stopped is not None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, up to the end of the stop string."""
        committed = len(self._row.tokens) - self._begin
        return committed if self.reader is None else min(committed, self.reader.num_tokens)

    def token(self, number: int) -> int:
        """Return new token `number`."""
        return self._row.tokens[self._begin + number]

    @property
    def tokens(self) -> list[int]:
        """New tokens, up to the end of the stop string."""
        return self._row.tokens[self._begin : self._begin + self.num_tokens]

    @property
    def finish_reason(self) -> str | None:
        """ "stop" at an end-of-text id or a stop string, else "length"; None: not ended."""
        if not self._row.ended:
            return None
        at_end = not self._row.request.eos.isdisjoint(self.tokens[-1:])
        return "stop" if at_end or self.stops() else "length"


def complete(batch: Batch, rows: Sequence[StoppedRow]) -> None:
    """Run a batch to its end, each row up to its stop string."""
    if all(row.reader is None for row in rows):
        batch.complete()
    while batch.advance():
        for row in rows:
            row.read()


class Stream:
    """Iterator over the new tokens of a prompt, as the target commits them.

    Args:
        batch: a batch of a single row.
        reader: decoder with its stop strings. The stream ends with the tokens of a stop string,
            and tokens after it if only they decide its text.

    Raises:
        RequestError: by ``next``: a row of logits has no distribution.
        RuntimeError: by ``next``: the chain has begun another batch, or the batch has failed.
    """

    def __init__(self, batch: Batch, reader: rooms.chat.StopStrings | None = None) -> None:
        self.batch = batch
        self._row = StoppedRow(batch, 0, reader)
        self._next = 0

    @property
    def stats(self) -> Stats:
        """Statistics, updated with each token."""
        return self.batch.stats

    @property
    def seeds(self) -> list[int]:
        """As `Output.seeds`, a single seed."""
        return self.batch.seeds

    @property
    def finish_reason(self) -> str | None:
        """As in `Output.finish_reasons`; None: the text has not ended."""
        return self._row.finish_reason

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        # Tokens come from the row's text, which is complete even if a round was interrupted.
        self._row.read()
        while self._next >= self._row.num_tokens:
            if not self.batch.advance():
                raise StopIteration
            self._row.read()
        self._next += 1
        return self._row.token(self._next - 1)
