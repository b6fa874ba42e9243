"""Prompt lookup: what followed the last n tokens when they stood earlier in the text.

A deterministic proposal: it draws nothing, so it has no logits and its distribution is one-hot.
Nothing to load and next to nothing to compute; good where the answer repeats its prompt (code,
summaries, quotations).
"""

from __future__ import annotations

from .. import arguments
from .base import Context, Proposal

LONGEST = 1024  # n-gram: every token of a text is indexed under one of each length


class PromptLookup:
    """Looks the longest suffix of at most `max_ngram` and at least `min_ngram` tokens up in the
    text before it.

    The latest occurrence wins. An index of all n-grams grows with the text and is undone on
    rollback, so that a proposal costs a few dictionary look-ups whatever the length of the context.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        max_ngram = arguments.integer("max_ngram", max_ngram, LONGEST, 1)
        min_ngram = arguments.integer("min_ngram", min_ngram, max_ngram, 1)
        self.name = "prompt lookup"
        self.num_forward_passes = 0
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._index: dict[
            tuple[int, ...], int
        ] = {}  # n-gram -> index of the token that followed it last
        self._undo: list[
            list[tuple[tuple[int, ...], int | None]]
        ] = []  # [p]: what indexing place p replaced

    def fork(self) -> PromptLookup:
        """Another with the same settings and nothing remembered."""
        return PromptLookup(self._sizes.start, self._sizes.stop + 1)

    def propose(self, context: Context, k: int) -> Proposal:
        """Up to `k` tokens; none where no suffix has been seen before."""
        tokens = context.tokens
        if context.valid == 0:
            self._index.clear()
            self._undo.clear()
        # An n-gram that ends before place p is indexed with p once token p is known.
        while len(self._undo) > context.valid:
            for key, previous in reversed(self._undo.pop()):
                if previous is None:
                    del self._index[key]
                else:
                    self._index[key] = previous
        for place in range(len(self._undo), len(tokens)):
            replaced = []
            for size in self._sizes:
                if place >= size:
                    key = tuple(tokens[place - size : place])
                    replaced.append((key, self._index.get(key)))
                    self._index[key] = place
            self._undo.append(replaced)
        for size in self._sizes:
            if len(tokens) >= size:
                start = self._index.get(tuple(tokens[-size:]))
                if start is not None:
                    return Proposal(tokens[start : start + k])
        return Proposal([])
