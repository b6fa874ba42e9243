"""Drafters without a model: prompt lookup, suffix matching, and a table of n-grams.

Each searches earlier tokens for the end of the text, and proposes the tokens that followed. The
proposals are deterministic: without draws and logits, with a one-hot distribution.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .. import arguments, rooms
from .base import Context, Proposal

_LONGEST = 1024  # maximum n-gram: every token is indexed under an n-gram of each length
_SUFFIX = 64  # maximum compared tokens of a suffix

Key = tuple[int, ...]


def _ngram_sizes(max_ngram: int, min_ngram: int) -> range:
    longest = arguments.integer("max_ngram", max_ngram, _LONGEST, 1)
    return range(longest, arguments.integer("min_ngram", min_ngram, longest, 1) - 1, -1)


def _suffixes(tokens: Sequence[int], sizes: range) -> list[Key]:
    count = len(tokens)
    return [tuple(tokens[count - size :]) for size in sizes if size <= count]


# ---- earlier tokens of the text ------------------------------------------------------------------


class _Text:
    """The text of a request, which grows and is truncated."""

    def __init__(self) -> None:
        self._tokens = array("q")

    def followed(self, context: Context, shortest: int, longest: int) -> int | None:
        """Return the index of the token after the latest earlier occurrence of the context's
        longest suffix of at most `longest` tokens; None: no suffix of `shortest` tokens occurred
        before."""
        del self._tokens[context.valid :]
        self._tokens.extend(context.tokens[len(self._tokens) :])
        count, size, end = len(self._tokens), 0, 0
        if count < 2:
            return None
        text = np.array(self._tokens)  # a copy, since an array with views cannot grow
        ends = np.flatnonzero(text[:-1] == text[-1]) + 1  # of earlier occurrences
        while len(ends) and size < longest:
            size, end = size + 1, int(ends[-1])
            ends = ends[ends > size]
            ends = ends[text[ends - size - 1] == text[count - size - 1]]
        return end if size >= shortest else None


class PromptLookup:
    """A drafter that proposes the tokens after the latest earlier occurrence of the text's longest
    suffix of `min_ngram` to `max_ngram` tokens.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024.
    """

    name = "prompt lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        sizes = _ngram_sizes(max_ngram, min_ngram)
        self._longest, self._shortest, self._text = sizes.start, sizes.stop + 1, _Text()

    def fork(self) -> PromptLookup:
        """Return a drafter with the same settings and an empty text."""
        return PromptLookup(self._longest, self._shortest)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens; none if no suffix has occurred before."""
        start = self._text.followed(context, self._shortest, self._longest)
        return Proposal([] if start is None else context.tokens[start : start + k])


class SuffixMatch:
    """A drafter that proposes the tokens after the latest earlier occurrence of the text's longest
    suffix, comparing at most max(64, `min_length`) tokens. A proposal that reaches the end of the
    text repeats itself.

    Args:
        min_length: minimum length of the suffix in tokens; without a match the proposal is empty.

    Raises:
        TypeError, ValueError: min_length < 1.
    """

    name = "suffix match"

    def __init__(self, min_length: int = 1) -> None:
        self.min_length = arguments.integer("min_length", min_length, arguments.SIZE_MAX, 1)
        self._text = _Text()

    def fork(self) -> SuffixMatch:
        """Return a drafter with the same setting and an empty text."""
        return SuffixMatch(self.min_length)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose `k` tokens; none if no suffix of `min_length` tokens has occurred before."""
        tokens, longest = context.tokens, max(self.min_length, _SUFFIX)
        start = self._text.followed(context, self.min_length, longest)
        if start is None:
            return Proposal([])
        period = len(tokens) - start
        return Proposal([tokens[start + i % period] for i in range(k)])


# ---- a table of n-grams --------------------------------------------------------------------------


class NGramTable:
    """A drafter that proposes, token by token, the most frequent token after the longest known
    suffix of `min_ngram` to `max_ngram` tokens, in earlier outputs and in texts passed to `learn`.

    The texts of a batch are counted when the next batch begins, so that no row of a batch depends
    on another (contract C3). The text that a seed gives depends on earlier texts, unless `learning`
    is False. Forks share a table. An unfinished text is known up to the latest draft.

    Args:
        max_ngram: maximum length of counted n-grams; the longest known is used.
        min_ngram: minimum length.
        max_entries: maximum number of n-grams; the least recently seen are dropped.
        learning: count the texts of requests. `learn` works in any case.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024, or max_entries < 1.
    """

    name = "n-gram table"

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 2,
        max_entries: int = 1_000_000,
        learning: bool = True,
    ) -> None:
        sizes = _ngram_sizes(max_ngram, min_ngram)
        self.learning = arguments.flag("learning", learning)
        self._sizes, self._limit = sizes, arguments.integer("max_entries", max_entries, low=1)
        # Forks share the counts of the tokens after each n-gram, oldest n-gram first, and the texts
        # that are not counted yet, of requests begun since the last `_close`.
        self._followers: dict[Key, dict[int, int]] = {}
        self._open: list[list[int]] = []
        self._text: list[int] = []

    def __len__(self) -> int:
        """Return the number of known n-grams."""
        return len(self._followers)

    def fork(self) -> NGramTable:
        """Return a drafter over the same table."""
        self._close()
        other = NGramTable.__new__(NGramTable)
        other.__dict__.update(self.__dict__, _text=[])
        return other

    def learn(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text ``[n]``, for example an earlier output."""
        self._add(arguments.row_integers("tokens", tokens))

    def _add(self, tokens: Sequence[int]) -> None:
        for end, token in enumerate(tokens):
            for key in _suffixes(tokens[max(0, end - self._sizes.start) : end], self._sizes):
                counts = self._followers.pop(key, {})
                counts[token] = counts.pop(token, 0) + 1
                self._followers[key] = counts  # the latest last
        while len(self._followers) > self._limit:
            del self._followers[next(iter(self._followers))]

    def _close(self, ended: list[int] | None = None) -> None:
        # Of all requests, or only that with the text `ended`.
        for text in list(self._open):
            if ended is None or text is ended:
                self._open[:] = [other for other in self._open if other is not text]
                self._add(text)

    def _best(self, tokens: Sequence[int]) -> int | None:
        for key in _suffixes(tokens, self._sizes):
            if counts := self._followers.get(key):
                return max(reversed(counts), key=counts.__getitem__)
        return None

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens, as many as the table knows."""
        if context.valid == 0:
            self._close(self._text)  # a request ends when the next begins
            self._text = []
            if self.learning:
                self._open.append(self._text)
        self._text[context.valid :] = context.tokens[context.valid :]
        recent = context.tokens[-self._sizes.start :]
        known = len(recent)
        while len(recent) < known + k:
            token = self._best(recent)
            if token is None:
                break
            recent.append(token)
        return Proposal(recent[known:])

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, including unfinished texts."""
        path = arguments.path("path", path)
        self._close()
        content = {
            "max_ngram": self._sizes.start,
            "min_ngram": self._sizes.stop + 1,
            "max_entries": self._limit,
            "followers": [[list(k), list(n.items())] for k, n in self._followers.items()],
        }
        rooms.files.replace_text(path, json.dumps(content))

    @classmethod
    def load(cls, path: str | Path, learning: bool = True) -> NGramTable:
        """Read the table that `save` wrote."""
        path = arguments.path("path", path)
        arguments.flag("learning", learning)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            table = cls(
                content["max_ngram"], content["min_ngram"], content["max_entries"], learning
            )
            table._followers = {
                tuple(map(int, key)): {int(token): int(count) for token, count in counts}
                for key, counts in content["followers"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"path: expected a file that NGramTable.save wrote, given {str(path)!r}: {error}"
            ) from error
        return table
