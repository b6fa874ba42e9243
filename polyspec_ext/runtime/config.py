"""What the parts of a running chain have to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..levels.id_map import IdMap
from ..ops import unchecked


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that draw tokens, as a chain calls them.

    Attributes:
        draw, verify, verify_tree: as of `ops.unchecked`, or what stands in for them: exact
            enumeration and measurements of everything else put their own here, such as `ps.sample`.
    """

    draw: Callable[..., Any] = unchecked.draw
    verify: Callable[..., Any] = unchecked.verify
    verify_tree: Callable[..., Any] = unchecked.verify_tree


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """The form of a chain, without its models.

    Attributes:
        names: of the levels, target first, drafter last; n of them.
        vocab_sizes: ids that each level draws are below these; no level draws an id that the level
            above it does not have.
        id_maps: between the ids of the text, the target's, and those of each level.
        windows: tokens that level i waits for, i = 1 ... n-1.
        rounds: blocks that level i waits for at most, i = 1 ... n-1; 0: no bound.
        tail: tokens that the drafter adds at most, unverified, to those that the target verifies.
        rule: "token" or "block".
        device: of the target.
        operators: draw the tokens.
    """

    names: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    id_maps: tuple[IdMap, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    rule: str
    device: torch.device
    operators: Operators = Operators()
    tail: int = 0

    @property
    def levels(self) -> int:
        """n: models, the drafter included."""
        return len(self.names)
