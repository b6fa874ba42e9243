"""A table of n-grams: what followed the last tokens most often, in texts seen before.

Its statistics come from what the process has generated already and from texts that it is given
(`NGramTable.learn`), so that it proposes also where the text at hand has no repetition yet. A
deterministic proposal: nothing is drawn, nothing computed but look-ups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .. import arguments
from ..files import replace_text
from .base import Context, Proposal
from .prompt_lookup import LONGEST

_FORMAT = 1  # of the file

Key = tuple[int, ...]


class _Counts:
    """How often each token followed each n-gram, and texts that are not counted yet."""

    def __init__(self, sizes: range, limit: int) -> None:
        self.sizes, self.limit = sizes, limit
        self.followers: dict[Key, dict[int, int]] = {}  # oldest n-gram first
        self.open: list[list[int]] = []  # of requests that have begun since the last `close`

    def add(self, tokens: Sequence[int]) -> None:
        for place in range(len(tokens)):
            token = tokens[place]
            for size in self.sizes:
                if place >= size:
                    key = tuple(tokens[place - size : place])
                    found = self.followers.pop(key, {})
                    found[token] = found.pop(token, 0) + 1
                    self.followers[key] = found  # the latest stand last
        while len(self.followers) > self.limit:
            del self.followers[next(iter(self.followers))]

    def close(self, ended: list[int] | None = None) -> None:
        """Counts the texts of the requests that have begun so far, or only `ended` if it is among
        them: they are over."""
        for text in list(self.open):
            if ended is None or text is ended:
                self.open = [other for other in self.open if other is not text]
                self.add(text)

    def best(self, tokens: Sequence[int]) -> int | None:
        """What followed the longest known suffix most often; of these the latest."""
        for size in self.sizes:
            if len(tokens) >= size:
                found = self.followers.get(tuple(tokens[len(tokens) - size :]))
                if found:
                    return max(reversed(found), key=found.__getitem__)
        return None


class NGramTable:
    """Proposes, token by token, what most often followed the longest known suffix of at most
    `max_ngram` and at least `min_ngram` tokens.

    The texts of a batch are counted when the next batch begins, so that no row of a batch depends
    on another (contract C3); what a seed gives depends on the texts before, unless `learning` is
    False. Forks share one table. Of a text in progress the table knows what stood at the latest
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
        max_ngram = arguments.integer("max_ngram", max_ngram, LONGEST, 1)
        min_ngram = arguments.integer("min_ngram", min_ngram, max_ngram, 1)
        max_entries = arguments.integer("max_entries", max_entries, low=1)
        arguments.flag("learning", learning)
        self.name = "n-gram table"
        self.num_forward_passes = 0
        self.learning = learning
        self._counts = _Counts(range(max_ngram, min_ngram - 1, -1), max_entries)
        self._text: list[int] = []

    def __len__(self) -> int:
        """N-grams that are known."""
        return len(self._counts.followers)

    def fork(self) -> NGramTable:
        """Another over the same table."""
        self._counts.close()
        made = NGramTable.__new__(NGramTable)
        made.__dict__.update(self.__dict__, _text=[])
        return made

    def learn(self, tokens: Sequence[int]) -> None:
        """Counts the n-grams of a text, such as an earlier output ``[n]``."""
        self._counts.add(arguments.row_integers("tokens", tokens))

    def propose(self, context: Context, k: int) -> Proposal:
        """Up to `k` tokens, as far as the table knows what follows."""
        if context.valid == 0:
            self._counts.close(self._text)  # a request ends where the next begins
            self._text = []
            if self.learning:
                self._counts.open.append(self._text)
        self._text[context.valid :] = context.tokens[context.valid :]
        longest = self._counts.sizes.start
        recent = context.tokens[-longest:]
        for _ in range(k):
            token = self._counts.best(recent)
            if token is None:
                break
            recent.append(token)
        return Proposal(recent[min(longest, len(context.tokens)) :])

    def save(self, place: str | Path) -> None:
        """Writes the table, with all texts so far, as JSON."""
        place = arguments.path("place", place)
        self._counts.close()
        counts = self._counts
        rows = [[list(key), list(own.items())] for key, own in counts.followers.items()]
        content = {
            "format": _FORMAT,
            "max_ngram": counts.sizes.start,
            "min_ngram": counts.sizes.stop + 1,
            "max_entries": counts.limit,
            "followers": rows,
        }
        replace_text(place, json.dumps(content))

    @classmethod
    def load(cls, place: str | Path, learning: bool = True) -> NGramTable:
        """The table that `save` wrote.

        Raises:
            TypeError: no path.
            ValueError: the file is none of those.
        """
        place = arguments.path("place", place)
        arguments.flag("learning", learning)
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            made = cls(content["max_ngram"], content["min_ngram"], content["max_entries"], learning)
            made._counts.followers = {
                tuple(map(int, key)): {int(token): int(count) for token, count in own}
                for key, own in content["followers"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"place: expected a file that NGramTable.save wrote, given {str(place)!r}: {error}"
            ) from error
        return made
