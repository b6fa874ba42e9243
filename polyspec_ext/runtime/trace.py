"""Which level proposed each token that a round has committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .rows import Entry


class Origin(NamedTuple):
    """The level that proposed a token, from 1, the target, to n, the drafter; and whether it did so
    in place of a token that it had rejected."""

    level: int
    corrected: bool


def origins(
    levels: int, steps: Sequence[int], entries: Sequence[Sequence[Entry]], slot: int
) -> list[Origin]:
    """Return the origin of each token that a round of the target has emitted in one row.

    Args:
        levels: n.
        steps: the level of each step in order; the last is the target's.
        entries: of each step, by row.
    """
    drafted = Origin(levels, False)
    pending: dict[int, list[Origin]] = {level: [] for level in range(levels + 1)}
    for level, by_row in zip(steps, entries, strict=False):  # a log may be longer
        asked, _, accepted, emitted, *_ = by_row[slot]
        if asked < 0:
            continue
        if level == levels and levels > 1:
            pending[level - 1] += [drafted] * emitted
            continue
        # A tail was drafted behind what the level below has emitted.
        tokens = [*pending[level], *[drafted] * asked][:accepted]
        pending[level] = []
        pending[level - 1] += [*tokens, *[Origin(level, accepted < asked)] * (emitted - accepted)]
    return pending[0]
