"""A round of the target: its steps, where they are known before its tokens are, and its sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class RoundPlan(NamedTuple):
    """One round of the target.

    Attributes:
        windows: tokens that level 1 ... n-1 waits for.
        steps: the level of each step in order, n for a draft; the last is 1. None where the order
            depends on the tokens, as a level waits for its window however many blocks that takes.
        max_pending: tokens that can be pending for level 1 ... n-1.
        asked: the levels with a part in the round, from 1 on.
        tail: of those pending for level 1, tokens that the last draft of the round may add.
    """

    windows: tuple[int, ...]
    steps: tuple[int, ...] | None
    max_pending: tuple[int, ...]
    asked: tuple[int, ...]
    tail: int = 0

    @property
    def levels(self) -> int:
        return len(self.windows) + 1

    @property
    def drafts(self) -> int:
        """Tokens of one draft."""
        return self.windows[-1]

    def drafts_at(self, place: int) -> int:
        """Tokens of the draft that is the step at `place`."""
        assert self.steps is not None
        return self.tail if self.tail and place == len(self.steps) - 2 else self.drafts

    @property
    def ahead(self) -> int:
        """Tokens by which a text can run ahead of what is committed."""
        return self.levels + sum(self.max_pending) + self.drafts + 1

    def lag(self, level: int) -> int:
        """Committed tokens that `level` has not read at most where a round begins: the last that it
        emitted itself, the bonus of every level above it, and a tail, which only the target and the
        drafter have read."""
        return level + (self.tail if 1 < level < self.levels else 0)

    def width_at(self, place: int) -> int:
        """Tokens that the level of the step at `place` reads at most, if it began the round with no
        larger lag: that, and those pending for it. Of the tail's draft also those pending for the
        target, since the drafter may read there first: with a window of 0 between the two, or where
        the end of a text leaves no room for one. Of three levels it has drafted before."""
        assert self.steps is not None
        level = self.steps[place]
        if level < self.levels:
            return self.lag(level) + self.max_pending[level - 1]
        late = self.tail > 0 and self.levels > 3 and place == len(self.steps) - 2
        return self.lag(level) + (self.max_pending[0] - self.tail if late else 0)


@functools.lru_cache(maxsize=1024)
def round_plan(windows: tuple[int, ...], rounds: tuple[int, ...], tail: int = 0) -> RoundPlan:
    """The round of a chain with these windows, rounds and tail (`ChainConfig`)."""
    count = len(windows)
    max_pending = [0] * count
    bounded = True

    def gather(level: int) -> list[int]:
        """The steps that fill the window of `level`."""
        nonlocal bounded
        window = windows[level - 1]
        if window == 0:
            return []
        if level == count:
            max_pending[level - 1] = window
            return [count + 1]
        below = [*gather(level + 1), level + 1]
        block, bound = max_pending[level] + 1, rounds[level - 1]
        bounded = bounded and bound > 0
        max_pending[level - 1] = window - 1 + block
        if bound:
            max_pending[level - 1] = min(bound * block, max_pending[level - 1])
        return below * max(bound, 1)

    gathered = gather(1)
    # As the state rows have it (round_state.hpp): a tail has no more tokens than a draft.
    tail = min(tail, windows[-1]) if gathered and count > 1 else 0
    max_pending[0] += tail
    steps = (*gathered, *([count + 1] if tail else []), 1)
    asked = tuple(sorted(set(steps)))
    return RoundPlan(windows, steps if bounded else None, tuple(max_pending), asked, tail)


def default_rounds(windows: Sequence[int]) -> list[int]:
    """Of each level above the lowest that verifies: the rounds of the level below that fill its
    window if everything is accepted. A verification of m tokens hands up to m + 1 up."""
    pairs = itertools.pairwise(windows)
    return [max(1, -(-window // (below + 1))) for window, below in pairs]
