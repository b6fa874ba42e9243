"""Copies of texts that were read before: keys and values by blocks of tokens (a radix tree), and
states that cannot be cut by whole texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

_Save = Callable[[int, int, int], Any]


class _Block:
    """Copies of what the levels keep of one block of tokens, behind the blocks above it."""

    def __init__(self, above: _Block | None, tokens: tuple[int, ...]) -> None:
        self.above, self.tokens = above, tokens
        self.below: dict[tuple[int, ...], _Block] = {}
        self.saved: dict[int, Any] = {}


class PrefixCache:
    """Copies of keys and values by the text that they belong to, the least recently used dropped.

    Args:
        capacity: tokens that are kept at most, in whole blocks.
        block: tokens of a block.
    """

    def __init__(self, capacity: int, block: int = 32) -> None:
        self.block = block
        self._most = capacity // block
        self._root = _Block(None, ())
        # Oldest first. A block is newer than those below it, so that the oldest has none.
        self._by_age: OrderedDict[int, _Block] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are kept."""
        return len(self._by_age) * self.block

    def find(self, text: Sequence[int]) -> dict[int, list[Any]]:
        """Return by level the copies of the longest known beginning of `text`, block by block."""
        path = self._path(text, grow=False)
        found: dict[int, list[Any]] = {}
        for number, block in enumerate(path):
            for level, saved in block.saved.items():
                if len(found.setdefault(level, [])) == number:
                    found[level].append(saved)
        return found

    def add(self, text: Sequence[int], lengths: Sequence[int], save: _Save) -> None:
        """Keep the beginning of `text` that each level has in its cache.

        Args:
            lengths: tokens in the cache of level 1, 2, ...
            save: called with a level's number and the bounds of a block that is not kept yet.
        """
        longest = min(max(lengths), self._most * self.block)
        for number, block in enumerate(self._path(text[:longest], grow=True)):
            begin, end = number * self.block, (number + 1) * self.block
            for level, length in enumerate(lengths, 1):
                if end <= length and level not in block.saved:
                    block.saved[level] = save(level, begin, end)
        while len(self._by_age) > self._most:
            _, oldest = self._by_age.popitem(last=False)
            if oldest.above is not None:
                del oldest.above.below[oldest.tokens]

    def _path(self, text: Sequence[int], grow: bool) -> list[_Block]:
        path, last = [], self._root
        for begin in range(0, len(text) - self.block + 1, self.block):
            tokens = tuple(text[begin : begin + self.block])
            block = last.below.get(tokens)
            if block is None:
                if not grow:
                    break
                block = last.below[tokens] = _Block(last, tokens)
            path.append(block)
            last = block
        for block in reversed(path):
            self._by_age[id(block)] = block
            self._by_age.move_to_end(id(block))
        return path


class StateCache:
    """Copies of states that cannot be cut, by level and the text that they belong to, the least
    recently used dropped.

    Args:
        most: copies of a level that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_age: dict[int, OrderedDict[tuple[int, ...], Any]] = {}

    def find(self, text: Sequence[int]) -> dict[int, tuple[int, Any]]:
        """Return by level how many tokens its longest copy is of that `text` begins with, and the
        copy."""
        found: dict[int, tuple[int, Any]] = {}
        for level, known in self._by_age.items():
            fitting = [one for one in known if one == tuple(text[: len(one)])]
            if fitting:
                longest = max(fitting, key=len)
                known.move_to_end(longest)
                found[level] = len(longest), known[longest]
        return found

    def add(self, text: Sequence[int], level: int, saved: Any) -> None:
        """Keep a copy of what a level has of `text`; None: nothing."""
        if saved is None:
            return
        known = self._by_age.setdefault(level, OrderedDict())
        known[tuple(text)] = saved
        known.move_to_end(tuple(text))
        while len(known) > self._most:
            known.popitem(last=False)
