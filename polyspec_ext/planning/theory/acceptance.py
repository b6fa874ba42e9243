"""What expectations are taken from: seconds of a chain's steps, and how likely each level accepts
what comes from below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class PassSeconds(Protocol):
    """Seconds of the steps of a chain of n levels, with `rows` rows in its caches. A step of
    several rows takes the time of the one with the most to read. `again`: since the level's last
    step no level above it has run, or, of level n, neither the target nor any above the one that it
    drafts for: its weights may lie in a cache of the processor still."""

    def verify(self, level: int, pending: int, rows: int = 1, again: bool = False) -> float:
        """Level `level` verifies `pending` tokens, in a pass that reads one more."""
        ...

    def draft(self, tokens: int, rows: int = 1, again: bool = False) -> float:
        """Level n is asked for `tokens`."""
        ...


@dataclass(frozen=True)
class ConstantSeconds:
    """A pass of M_i takes T_i whatever it reads, and M_n one pass for each token: the papers' view.

    Args:
        seconds: T_1 ... T_n.
    """

    seconds: Sequence[float]

    def verify(self, level: int, pending: int, rows: int = 1, again: bool = False) -> float:
        return self.seconds[level - 1]

    def draft(self, tokens: int, rows: int = 1, again: bool = False) -> float:
        return tokens * self.seconds[-1]


class Proposals(NamedTuple):
    """What a drafter proposes that is no model: its number of tokens differs from place to place.

    Attributes:
        accept: ``[P, K]``, the probability that the level above accepts token j of a proposal at
            position p, if those before it are accepted.
        counts: ``[P]``, tokens that it has to propose there; at most K.
    """

    accept: Floats
    counts: Ints


@dataclass(frozen=True)
class Acceptance:
    """How likely each level accepts what comes from below.

    Attributes:
        levels: for level 1 ... n-1, ``[P]``: the probability that it accepts a token at position p,
            if those before it in the block are. P = 1: at any position of an endless text.
        remaining: ``[P]``, tokens left of each text from position p on, p itself included; texts
            stand one behind the other. None: endless.
        proposals: takes the place of the last of `levels`.
        tail: how likely level 1 accepts what level n proposes, ``[P]`` as `levels` have it or as
            `proposals` do. None: for chains without a tail.
        room: ``[P]``, tokens that the request allows from position p on; more than `remaining`
            where the text ends with an EOS, which no level knows before it is proposed. None: each
            text is as long as its request allows.
    """

    levels: tuple[Floats, ...]
    remaining: Ints | None = None
    proposals: Proposals | None = None
    tail: Floats | Proposals | None = None
    room: Ints | None = None

    @classmethod
    def constant(cls, *levels: float, tail: float | None = None) -> Acceptance:
        """The same everywhere: a_1 ... a_{n-1}, and that of a tail."""
        own = None if tail is None else np.array([tail], np.float64)
        return cls(tuple(np.array([a], np.float64) for a in levels), tail=own)
