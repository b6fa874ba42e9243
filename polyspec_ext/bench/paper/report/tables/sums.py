"""What the levels of a method did, summed over turns."""

from __future__ import annotations

from dataclasses import dataclass

from .. import statistics
from ..statistics import Turns


@dataclass
class Sums:
    """Of a level, over turns; `accepted` tokens by `verified` verifications."""

    name: str
    passes: int = 0
    seconds: float = 0.0
    verified: int = 0
    accepted: int = 0

    @property
    def length(self) -> float | None:
        """L."""
        return over(self.accepted, self.verified)

    @property
    def pass_seconds(self) -> float | None:
        """T."""
        return over(self.seconds, self.passes)


def sums(turns: Turns) -> tuple[int, float | None, list[Sums]]:
    """New tokens, decode seconds (None where they are not told), and the sums by level."""
    tokens, decode, known = 0, 0.0, True
    found: list[Sums] = []
    for turn in turns.values():
        tokens += turn.new_tokens or 0
        spent = statistics.decode_seconds(turn)
        if spent is None:
            known = False
        else:
            decode += spent
        for place, level in enumerate(turn.levels):
            if place == len(found):
                found.append(Sums(level.name))
            entry = found[place]
            entry.passes += level.passes
            entry.seconds += level.seconds
            entry.verified += len(level.accepted)
            entry.accepted += sum(level.accepted)
    return tokens, decode if known and turns else None, found


def over(a: float | None, b: float | None) -> float | None:
    """The ratio; None where it has none."""
    return a / b if a is not None and b else None
