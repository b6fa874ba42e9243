"""What a chain gives back: all tokens at once, or each as it is committed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .chat import FittedPrompt, TextDecoder
from .runtime.batch import Batch
from .stats import Stats


class TargetTokenizer:
    """The tokenizer that lies beside a target's weights, read when it is first asked for.

    Args:
        level: the target.
        name: of it, for messages.
    """

    def __init__(self, level: object, name: str) -> None:
        self._level, self._name, self._found = level, name, None

    def find(self) -> Any:
        """Return the tokenizer, or None."""
        find = getattr(self._level, "tokenizer", None)
        if self._found is None and callable(find):
            self._found = find()
        return self._found

    def require(self, what: str) -> Any:
        """Return the tokenizer.

        Raises:
            ValueError: there is none; begins with `what`.
        """
        if self.find() is None:
            raise ValueError(
                f"{what}: expected a target with a tokenizer beside its weights, given {self._name}"
            )
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy` and `pickle` without the level, whose weights are large."""
        return {"_level": None, "_name": self._name, "_found": self.find()}


@dataclass(slots=True)
class Output:
    """What `Chain.generate` returns.

    Attributes:
        sequences: ``[B, N]`` int64, prompts and new tokens, short rows padded at their end.
        stats: of the whole batch.
        requests: the statistics of each row. Times are those of the passes it took part in.
        logprobs: of the new tokens of each row, under the target's processed distribution.
        seeds: of each row; as `seed` of the same call they give the same tokens. Where no row
            samples, those of seed 0.
        new_tokens: of each row, without prompt and padding.
        tokenizer: of the target, for `text`.
    """

    sequences: torch.Tensor
    stats: Stats
    requests: list[Stats] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list, repr=False)
    tokenizer: TargetTokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> list[str]:
        """The new tokens of each row as text, without special tokens.

        Raises:
            ValueError: no tokenizer lies beside the target's weights.
        """
        tokenizer = (self.tokenizer or TargetTokenizer(None, "none")).require("text")
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in self.new_tokens]


class Stream:
    """Iterator over the new tokens of one prompt, as the target commits them.

    Args:
        batch: of one row.

    Raises:
        RequestError: of ``next``: a row of logits has no distribution.
        RuntimeError: of ``next``: the chain has begun another batch since, or this one failed.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._next = len(batch.rows[0].tokens)

    @property
    def stats(self) -> Stats:
        """Up to date after each token."""
        return self.batch.stats

    @property
    def seeds(self) -> list[int]:
        """As `Output.seeds`: one."""
        return self.batch.seeds

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        # Read off the text itself, of which an interrupt behind a round loses nothing.
        tokens = self.batch.rows[0].tokens
        if self._next == len(tokens) and not self.batch.advance():
            raise StopIteration
        token = tokens[self._next]
        self._next += 1
        return token


class Answer:
    """Iterator over an answer's text, in pieces as the target commits them (`Chain.chat`).

    Attributes:
        prompt: what the target reads.
        left_out: how many of the oldest messages the context had no room for.
        limit: tokens that the answer may have.
        context: tokens that prompt and answer may have; None: any number.
        stream: of its tokens.
    """

    def __init__(self, tokenizer: Any, fitted: FittedPrompt, stream: Stream) -> None:
        self.prompt, self.left_out, self.limit, self.context = fitted
        self.stream = stream
        self._decoder = TextDecoder(tokenizer)
        self._pieces = self._read()

    @property
    def text(self) -> str:
        """So far."""
        return self._decoder.text

    @property
    def tokens(self) -> list[int]:
        """So far, those that end it among them."""
        return self._decoder.tokens

    @property
    def ends(self) -> Collection[int]:
        """Ids that end it."""
        return self.stream.batch.rows[0].eos

    @property
    def message(self) -> dict[str, str]:
        """What was said so far, for the conversation that goes on."""
        return {"role": "assistant", "content": self.text}

    @property
    def stats(self) -> Stats:
        """Up to date after each piece."""
        return self.stream.stats

    @property
    def seeds(self) -> list[int]:
        """As `Output.seeds`: one."""
        return self.stream.seeds

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def rest(self) -> str:
        """Return the text that an interrupted iteration has not yielded."""
        return self._decoder.rest()

    def _read(self) -> Iterator[str]:
        for token in self.stream:
            if piece := self._decoder.add(token):
                yield piece
        if piece := self.rest():
            yield piece
