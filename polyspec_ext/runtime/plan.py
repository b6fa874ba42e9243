"""The steps of a target's round, where they are known before its tokens are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..ops.schedule import ScheduleShape


class Program(NamedTuple):
    """One round of the target: drafts and verifications in order.

    Attributes:
        steps: the level of each step, n for a draft; the last is 1.
        most: tokens that can wait for level 1 ... n-1.
        windows, rounds: as of `Scheduler`.
    """

    steps: tuple[int, ...]
    most: tuple[int, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]

    @property
    def levels(self) -> int:
        return len(self.windows) + 1

    @property
    def drafts(self) -> int:
        """Tokens of one draft."""
        return self.windows[-1]

    @property
    def tail(self) -> int:
        """Tokens that a row's line has room for: what some cache lacks at the start, and all that
        can wait at once."""
        return self.levels + sum(self.most) + 1

    def width(self, level: int) -> int:
        """Tokens that `level` reads at most in one step: those that wait for it, the last that it
        emitted itself, and the bonus of every level above it."""
        return level + (self.most[level - 1] if level < self.levels else 0)


def program(windows: Sequence[int], rounds: Sequence[int]) -> Program | None:
    """The round of a chain with these windows and rounds (as of `Scheduler`); None
    where it depends on the tokens, since a level waits for its window however many rounds that
    takes, and where there are too many levels."""
    count = len(windows)
    if not 1 <= count < ScheduleShape.MAX_LEVELS:
        return None
    most = [0] * count

    def gather(level: int) -> list[int]:
        """The steps that fill the window of `level`."""
        window = windows[level - 1]
        if window == 0:
            return []
        if level == count:
            most[level - 1] = window
            return [count + 1]
        below = [*gather(level + 1), level + 1]
        block = most[level] + 1
        most[level - 1] = min(rounds[level - 1] * block, window - 1 + block)
        return below * rounds[level - 1]

    for level in range(1, count):  # the levels above the lowest that is asked
        if windows[level - 1] == 0:
            break
        if rounds[level - 1] == 0:
            return None
    steps = (*gather(1), 1)
    return Program(steps, tuple(most), tuple(windows), tuple(rounds))


def default_rounds(windows: Sequence[int]) -> list[int]:
    """Of each level above the lowest that verifies: the rounds of the level below that fill its
    window if everything is accepted. A verification of m tokens hands up to m + 1 up."""
    pairs = itertools.pairwise(windows)
    return [max(1, -(-window // (below + 1))) for window, below in pairs]
