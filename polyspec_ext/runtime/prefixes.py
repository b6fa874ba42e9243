"""Copies of the levels' caches by text: keys and values by runs of tokens in a radix tree, and
states that cannot be cut, by whole texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tensors import common_prefix

Copies = list[tuple[Any, int]]  # in text order, each with its number of valid tokens
_Save = Callable[[int, int, int], Any]
_LONGEST = 256  # maximum tokens of a run; a run is dropped as a whole


class _Run:
    """Node of the radix tree: a run of tokens after the first `at` tokens of the run `above`.
    `saved` has, by level, the number of copied tokens, and the copy."""

    def __init__(self, above: _Run | None, at: int, tokens: Sequence[int]) -> None:
        self.above, self.at, self.tokens = above, at, list(tokens)
        self.below: dict[tuple[int, int], _Run] = {}
        self.saved: dict[int, tuple[int, Any]] = {}


class Prefixes:
    """Copies of the levels' caches by text; the least recently used copies are dropped.

    Args:
        capacity: maximum tokens of all runs.
        states: maximum whole texts of a level.
    """

    def __init__(self, capacity: int, states: int) -> None:
        self.capacity, self._most_states = capacity, states
        self._root = _Run(None, 0, ())
        # Oldest first. A run is newer than the runs below it, so that the oldest run is a leaf.
        self._by_age: OrderedDict[int, _Run] = OrderedDict()
        self._states: dict[int, OrderedDict[tuple[int, ...], Any]] = {}
        self._stamp: tuple[object] | None = None

    def forget_unless(self, stamp: object) -> object:
        """Forget all copies, unless they are of models with this `stamp` (`Unchanged.stamp`).
        Returns an object for these models, which is another one after any change."""
        if self._stamp is None or self._stamp[0] != stamp:
            self._stamp = (stamp,)
            self._root = _Run(None, 0, ())
            self._by_age.clear()
            self._states.clear()
        return self._stamp

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all runs."""
        return sum(len(run.tokens) for run in self._by_age.values())

    def find(
        self, text: Sequence[int], ahead: Mapping[int, int] | None = None
    ) -> dict[int, Copies]:
        """Return by level the copies of the longest saved prefix of `text`.

        Args:
            ahead: by level another level, which must have copies of at least one token more than
                the state of the first."""
        copies: dict[int, Copies] = {}
        lengths: dict[int, int] = {}
        begin = 0
        for run, count in self._path(text):
            for level, (size, copy) in run.saved.items():
                if lengths.get(level, 0) == begin:
                    copies.setdefault(level, []).append((copy, min(size, count)))
                    lengths[level] = begin + min(size, count)
            begin += count
        for level, known in self._states.items():
            most = len(text)
            if ahead is not None and level in ahead:
                most = lengths.get(ahead[level], 0) - 1
            fitting = [x for x in known if len(x) <= most and x == tuple(text[: len(x)])]
            if fitting:
                longest = max(fitting, key=len)
                known.move_to_end(longest)
                copies[level] = [(known[longest], len(longest))]
        return copies

    def add(self, text: Sequence[int], lengths: Sequence[int], save: _Save) -> None:
        """Save the prefix of `text` in each level's cache.

        Args:
            lengths: cached lengths of level 1, 2, ...
            save: called with a level's number and the bounds of tokens without a copy.
        """
        text = text[: min(max(lengths), self.capacity)]
        path = self._path(text)
        last, at = path[-1] if path else (self._root, 0)
        begin = sum(count for _, count in path)
        for start in range(begin, len(text), _LONGEST):
            run = _Run(last, at, text[start : start + _LONGEST])
            self._by_age[id(run)] = last.below[at, run.tokens[0]] = run
            last, at = run, len(run.tokens)
            path.append((run, at))
        self._touch(path)
        begin = 0
        for run, count in path:
            for level, length in enumerate(lengths, 1):
                size = min(length - begin, count)
                if size > run.saved.get(level, (0, None))[0]:
                    copy = save(level, begin, begin + size)
                    if copy is not None:
                        run.saved[level] = size, copy
            begin += count
        excess = self.num_tokens - self.capacity
        while excess > 0:
            _, oldest = self._by_age.popitem(last=False)
            key = oldest.at, oldest.tokens[0]
            # (An interrupt may have prevented the insertion of a run.)
            if oldest.above is not None and oldest.above.below.get(key) is oldest:
                del oldest.above.below[key]
            excess -= len(oldest.tokens)

    def add_state(self, text: Sequence[int], level: int, copy: Any) -> None:
        """Save a level's copy of the state after `text`; None: save nothing."""
        if copy is None:
            return
        known = self._states.setdefault(level, OrderedDict())
        known[tuple(text)] = copy
        known.move_to_end(tuple(text))
        while len(known) > self._most_states:
            known.popitem(last=False)

    def _path(self, text: Sequence[int]) -> list[tuple[_Run, int]]:
        """Return the runs of the longest saved prefix, each with its number of common tokens."""
        path: list[tuple[_Run, int]] = []
        run, count, begin = self._root, 0, 0
        while begin < len(text) and (below := run.below.get((count, text[begin]))) is not None:
            run, count = below, common_prefix(below.tokens, text[begin:])
            path.append((run, count))
            begin += count
        self._touch(path)
        return path

    def _touch(self, path: Sequence[tuple[_Run, int]]) -> None:
        for run, _ in reversed(path):
            self._by_age[id(run)] = run
            self._by_age.move_to_end(id(run))
