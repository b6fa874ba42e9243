"""Tokens of documents, cut into rows of one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch


class Document(NamedTuple):
    """A text."""

    ids: torch.Tensor  # [N] int64
    begin: int = 0  # of what is learnt; before it is what the target never writes


class Rows(NamedTuple):
    """Texts end to end, cut."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool, which of them are learnt


class Stream:
    """Endless rows: the documents again and again, each time in a new order and cut elsewhere. Row
    i is the same whenever it is asked for.

    Args:
        documents: at least two rows of tokens.

    Raises:
        ValueError: they have fewer.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int) -> None:
        self._documents, self._length, self._seed = documents, length, seed
        self._rounds: dict[int, Rows] = {}
        self._begins = [0]  # of each round
        total = sum(len(one.ids) for one in documents)
        if total < 2 * length:
            raise ValueError(
                f"texts: expected at least {2 * length} tokens, given {total} in "
                f"{len(documents)} texts"
            )

    def _round(self, number: int) -> Rows:
        """Shuffled documents end to end, cut into rows, which are shuffled; the latest is kept."""
        if number in self._rounds:
            return self._rounds[number]
        length, generator = self._length, torch.Generator().manual_seed(self._seed + number)
        order = torch.randperm(len(self._documents), generator=generator).tolist()
        documents = [self._documents[i] for i in order]
        # A random start moves the cuts, so that no document is always split at the same place.
        start = int(torch.randint(0, length, (1,), generator=generator))
        count = (sum(len(one.ids) for one in documents) - start) // length
        mixed = torch.randperm(count, generator=generator)

        def cut(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts)[start : start + count * length].view(count, length)[mixed]

        learnt = [torch.arange(len(one.ids)) >= one.begin for one in documents]
        self._rounds = {number: Rows(cut([one.ids for one in documents]), cut(learnt))}
        return self._rounds[number]

    def rows(self, begin: int, count: int) -> Rows:
        """Rows begin to begin + count."""
        parts: list[Rows] = []
        number = 0
        while count:
            if number + 1 == len(self._begins):
                self._begins.append(self._begins[-1] + len(self._round(number).tokens))
            first, end = self._begins[number : number + 2]
            if begin < end:
                own, at = self._round(number), begin - first
                taken = min(count, end - begin)
                parts.append(Rows(own.tokens[at : at + taken], own.learnt[at : at + taken]))
                begin, count = begin + taken, count - taken
            number += 1
        return Rows(torch.cat([p.tokens for p in parts]), torch.cat([p.learnt for p in parts]))


def frequent(documents: Sequence[Document], size: int, vocab_size: int) -> torch.Tensor:
    """Return the `size` most frequent ids, ascending; where the documents have fewer, the lowest
    others as well, which in vocabularies of byte pairs are about the most frequent."""
    seen = Counter(chain.from_iterable(one.ids.tolist() for one in documents))
    known = [token for token, _ in seen.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in seen)
    known += [token for token, _ in zip(rest, range(size - len(known)), strict=False)]
    return torch.tensor(sorted(known))
