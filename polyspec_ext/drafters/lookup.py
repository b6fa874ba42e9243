"""Drafters without a model: prompt lookup, a table of n-grams, and suffix matching.

Each looks the end of the text up in earlier tokens and proposes what followed there. Such a
proposal is deterministic: it draws nothing, has no logits, and its distribution is one-hot.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import arguments
from ..files import replace_text
from .base import Context, Proposal

_LONGEST = 1024  # n-gram: every token of a text is indexed under one of each length
_FORMAT = 1  # of the file of an n-gram table
_CAP = 32  # suffixes whose latest end is updated with each token, the longest first

Key = tuple[int, ...]


def _ngram_sizes(max_ngram: int, min_ngram: int) -> range:
    longest = arguments.integer("max_ngram", max_ngram, _LONGEST, 1)
    return range(longest, arguments.integer("min_ngram", min_ngram, longest, 1) - 1, -1)


def _suffixes(tokens: Sequence[int], sizes: range) -> list[Key]:
    count = len(tokens)
    return [tuple(tokens[count - size :]) for size in sizes if size <= count]


class PromptLookup:
    """Proposes what followed the longest suffix of at most `max_ngram` and at least `min_ngram`
    tokens when it last occurred in the text.

    An index of all n-grams grows with the text and is undone on rollback, so that a proposal costs
    a few dictionary look-ups whatever the length of the context.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.name = "prompt lookup"
        self.num_forward_passes = 0
        self._sizes = _ngram_sizes(max_ngram, min_ngram)
        self._text: list[int] = []
        # The indices of the tokens that followed an n-gram, in rising order.
        self._index: defaultdict[Key, list[int]] = defaultdict(list)

    def fork(self) -> PromptLookup:
        """Return another with the same settings and an empty index."""
        return PromptLookup(self._sizes.start, self._sizes.stop + 1)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens; none where no suffix has occurred before."""
        tokens, text = context.tokens, self._text
        if context.valid == 0:
            text.clear()
            self._index.clear()
        while len(text) > context.valid:
            text.pop()
            for key in _suffixes(text, self._sizes):
                self._index[key].pop()
        for token in tokens[len(text) :]:
            for key in _suffixes(text, self._sizes):
                self._index[key].append(len(text))
            text.append(token)
        for key in _suffixes(text, self._sizes):
            if followers := self._index.get(key):
                return Proposal(tokens[followers[-1] : followers[-1] + k])
        return Proposal([])


# ---- a table of n-grams --------------------------------------------------------------------------


class _Counts:
    """How often each token followed each n-gram, and texts that are not counted yet."""

    def __init__(self, sizes: range, limit: int) -> None:
        self.sizes, self.limit = sizes, limit
        self.followers: dict[Key, dict[int, int]] = {}  # oldest n-gram first
        self.open: list[list[int]] = []  # of requests that have begun since the last `close`

    def add(self, tokens: Sequence[int]) -> None:
        for end, token in enumerate(tokens):
            for key in _suffixes(tokens[max(0, end - self.sizes.start) : end], self.sizes):
                counts = self.followers.pop(key, {})
                counts[token] = counts.pop(token, 0) + 1
                self.followers[key] = counts  # the latest come last
        while len(self.followers) > self.limit:
            del self.followers[next(iter(self.followers))]

    def close(self, ended: list[int] | None = None) -> None:
        """Count all open texts, or `ended` alone if it is one: their requests are over."""
        for text in list(self.open):
            if ended is None or text is ended:
                self.open = [other for other in self.open if other is not text]
                self.add(text)

    def best(self, tokens: Sequence[int]) -> int | None:
        """Return what followed the longest known suffix most often; of several the latest."""
        for key in _suffixes(tokens, self.sizes):
            if counts := self.followers.get(key):
                return max(reversed(counts), key=counts.__getitem__)
        return None


class NGramTable:
    """Proposes, token by token, what most often followed the longest known suffix of at most
    `max_ngram` and at least `min_ngram` tokens, in earlier outputs and in texts that it `learn`s.

    The texts of a batch are counted when the next batch begins, so that no row of a batch depends
    on another (contract C3); what a seed gives depends on the texts before, unless `learning` is
    False. Forks share one table. Of a text in progress the table knows the tokens of the latest
    draft.

    Args:
        max_ngram, min_ngram: lengths of the n-grams that are counted, longest first.
        max_entries: n-grams that are kept; those that were not met for longest go first.
        learning: count the texts that it drafts for. `learn` works in any case.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024, or max_entries < 1.
    """

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 2,
        max_entries: int = 1_000_000,
        learning: bool = True,
    ) -> None:
        sizes = _ngram_sizes(max_ngram, min_ngram)
        self.name = "n-gram table"
        self.num_forward_passes = 0
        self.learning = arguments.flag("learning", learning)
        self._counts = _Counts(sizes, arguments.integer("max_entries", max_entries, low=1))
        self._text: list[int] = []

    def __len__(self) -> int:
        """Return how many n-grams are known."""
        return len(self._counts.followers)

    def fork(self) -> NGramTable:
        """Return another over the same table."""
        self._counts.close()
        other = NGramTable.__new__(NGramTable)
        other.__dict__.update(self.__dict__, _text=[])
        return other

    def learn(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text, such as an earlier output ``[n]``."""
        self._counts.add(arguments.row_integers("tokens", tokens))

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens, as far as the table knows what follows."""
        if context.valid == 0:
            self._counts.close(self._text)  # a request ends where the next begins
            self._text = []
            if self.learning:
                self._counts.open.append(self._text)
        self._text[context.valid :] = context.tokens[context.valid :]
        recent = context.tokens[-self._counts.sizes.start :]
        known = len(recent)
        while len(recent) < known + k:
            token = self._counts.best(recent)
            if token is None:
                break
            recent.append(token)
        return Proposal(recent[known:])

    def save(self, place: str | Path) -> None:
        """Write the table, with all texts so far, as JSON."""
        place = arguments.path("place", place)
        self._counts.close()
        counts = self._counts
        content = {
            "format": _FORMAT,
            "max_ngram": counts.sizes.start,
            "min_ngram": counts.sizes.stop + 1,
            "max_entries": counts.limit,
            "followers": [[list(k), list(n.items())] for k, n in counts.followers.items()],
        }
        replace_text(place, json.dumps(content))

    @classmethod
    def load(cls, place: str | Path, learning: bool = True) -> NGramTable:
        """Read the table that `save` wrote."""
        place = arguments.path("place", place)
        arguments.flag("learning", learning)
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            table = cls(
                content["max_ngram"], content["min_ngram"], content["max_entries"], learning
            )
            table._counts.followers = {
                tuple(map(int, key)): {int(token): int(count) for token, count in counts}
                for key, counts in content["followers"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"place: expected a file that NGramTable.save wrote, given {str(place)!r}: {error}"
            ) from error
        return table


# ---- suffix matching -----------------------------------------------------------------------------


class Match(NamedTuple):
    """The longest suffix of the text that occurs earlier as well.

    Attributes:
        length: tokens; 0: there is none.
        end: index of the token that followed such an earlier occurrence.
    """

    length: int
    end: int


class _Undo(NamedTuple):
    """The changes that the latest token made."""

    size: int
    last: int
    added: list[int]  # states whose transition for the token is new
    redirected: list[int]  # states whose transition led to `original` before
    original: int
    link: int  # of `original`
    ends: list[tuple[int, int]]  # states and their latest ends


class SuffixAutomaton:
    """All substrings of a text that grows and shrinks at its end (Blumer et al., 1985), for a
    constant number of dictionary accesses per token on average.

    A state is a set of substrings that end at the same indices: its transitions by token, the
    length of the longest of them, the state of their longest suffix that ends elsewhere too
    (`link`), and the latest known end.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.matches: list[Match] = []  # of every prefix of the text
        self._next: list[dict[int, int]] = [{}]
        self._length, self._link, self._end = [0], [-1], [0]
        self._last = 0
        self._undo: list[_Undo] = []

    def _add_state(self, moves: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(moves)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def append(self, token: int) -> None:
        """Grow the text by one token."""
        size, last = len(self._next), self._last
        added: list[int] = []
        redirected: list[int] = []
        original = link = -1
        end = len(self.tokens) + 1
        new = self._add_state({}, end, 0, end)
        at = last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            added.append(at)
            at = self._link[at]
        if at >= 0:
            known = self._next[at][token]
            if self._length[known] != self._length[at] + 1:
                # Shorter substrings of the state end here as well: they get a state themselves.
                original, link = known, self._link[known]
                known = self._add_state(
                    dict(self._next[original]), self._length[at] + 1, link, self._end[original]
                )
                while at >= 0 and self._next[at].get(token) == original:
                    self._next[at][token] = known
                    redirected.append(at)
                    at = self._link[at]
                self._link[original] = known
            self._link[new] = known
        suffix = self._link[new]
        self.matches.append(Match(self._length[suffix], self._end[suffix]))
        ends: list[tuple[int, int]] = []
        while suffix > 0 and len(ends) < _CAP:
            ends.append((suffix, self._end[suffix]))
            self._end[suffix] = end
            suffix = self._link[suffix]
        self.tokens.append(token)
        self._last = new
        self._undo.append(_Undo(size, last, added, redirected, original, link, ends))

    def pop(self) -> None:
        """Shrink the text by its last token."""
        undo, token = self._undo.pop(), self.tokens.pop()
        self.matches.pop()
        for state, end in undo.ends:
            self._end[state] = end
        for state in undo.added:
            del self._next[state][token]
        for state in undo.redirected:
            self._next[state][token] = undo.original
        if undo.original >= 0:
            self._link[undo.original] = undo.link
        for column in (self._next, self._length, self._link, self._end):
            del column[undo.size :]
        self._last = undo.last


class SuffixMatch:
    """Proposes what followed the longest suffix of the text at its latest known earlier occurrence;
    where that runs into the end of the text the proposal repeats itself.

    Args:
        min_length: of the suffix, in tokens; behind a shorter one nothing is proposed.

    Raises:
        TypeError, ValueError: min_length < 1.
    """

    def __init__(self, min_length: int = 1) -> None:
        self.name = "suffix match"
        self.num_forward_passes = 0
        self.min_length = arguments.integer("min_length", min_length, arguments.SIZE_MAX, 1)
        self._text = SuffixAutomaton()

    def fork(self) -> SuffixMatch:
        """Return another with the same setting and an empty text."""
        return SuffixMatch(self.min_length)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose `k` tokens; none where no suffix of `min_length` tokens has occurred before."""
        tokens = context.tokens
        if context.valid == 0:
            self._text = SuffixAutomaton()
        text = self._text
        while len(text.tokens) > context.valid:
            text.pop()
        for token in tokens[len(text.tokens) :]:
            text.append(token)
        if not tokens or text.matches[-1].length < self.min_length:
            return Proposal([])
        start = text.matches[-1].end
        period = len(tokens) - start
        return Proposal([tokens[start + i % period] for i in range(k)])
