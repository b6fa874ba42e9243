"""The form of a chain, what its levels and its drafter must be able to do, and whether the host has
to read between their steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..drafters.base import BatchedDrafter
from ..levels.base import BatchedLevel, IdMap
from ..ops import unchecked
from .plan import round_plan


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


def levels_with_hidden(levels: Sequence[BatchedLevel], drafter: BatchedDrafter) -> set[int]:
    """Numbers of the levels whose hidden states the drafter is told.

    Raises:
        ValueError: a level has none, or the target's are of another width than the drafter reads,
            or of fewer layers.
    """
    wanted = drafter.capabilities
    found = set()
    for number, level in enumerate(levels if wanted.hidden_layers else (), 1):
        can = level.capabilities
        if not can.hidden_states:
            raise ValueError(
                f"{level.name}: expected a level that gives hidden states, as "
                f"{drafter.name} wants them, given one that does not"
            )
        sizes = {wanted.hidden_size, can.hidden_size} - {None}
        deepest = max(wanted.hidden_layers)
        deep = can.num_layers is None or can.num_layers >= deepest
        if len(sizes) < 2 and deep:
            found.add(number)
        elif number == 1 and deep:
            raise ValueError(
                f"{level.name}: expected hidden states of {wanted.hidden_size} values, as "
                f"{drafter.name} reads them, given {can.hidden_size}"
            )
        elif number == 1:
            raise ValueError(
                f"{level.name}: expected hidden states of layer {deepest}, as {drafter.name} reads "
                f"them, given {can.num_layers} layers"
            )
    return found


# Attributes of a level or drafter, by the capability that states them.
_STATED = {"continues": ("revision",), "keeps_lengths": ("reserve_span", "note_lengths")}


def require_stated(part: BatchedLevel | BatchedDrafter) -> None:
    """Require of `part` the attributes of the capabilities that it states.

    Raises:
        ValueError: names the level or drafter, the capability and the attribute.
    """
    for capability, names in _STATED.items():
        lacks = [name for name in names if not hasattr(part, name)]
        if lacks and getattr(part.capabilities, capability):
            raise ValueError(
                f"{part.name}: expected an attribute `{lacks[0]}` beside capabilities with "
                f"`{capability}`, given none"
            )


def require_common_ids(names: Sequence[str], entries: int) -> None:
    """Require that the drafter draws some id that the level above it has.

    Args:
        names: of the levels, drafter last.
        entries: of the drafter's rows of logits that stand for such an id.

    Raises:
        ValueError: names the drafter.
    """
    if entries == 0:
        raise ValueError(
            f"{names[-1]}: expected a drafter that draws some id of {names[-2]}, the level above "
            "it, given one that draws none of them"
        )


def require_all_ids(levels: Sequence[BatchedLevel]) -> None:
    """Levels that verify can draw every id that they read.

    Raises:
        ValueError: names the level that cannot.
    """
    for level in levels:
        id_map = level.capabilities.id_map
        if id_map is not None and id_map.drawn is not None:
            raise ValueError(
                f"{level.name}: expected a level that draws all of its {level.vocab_size} ids, "
                f"given one that draws {len(id_map.drawn)}; only the last level of a chain may"
            )


def require_trees(levels: Sequence[BatchedLevel], drafter: BatchedDrafter, tail: int) -> None:
    """If the drafter drafts trees, the level above it reads them, and there is no tail.

    Raises:
        ValueError: names the level, or `tail`.
    """
    if not drafter.capabilities.trees:
        return
    above = levels[-1]
    if not above.capabilities.trees:
        reason = getattr(above, "no_trees", f"{type(above).__name__} does not")
        raise ValueError(
            f"{above.name}: expected a level that reads trees, as {drafter.name} drafts them, "
            f"given one that does not: {reason}"
        )
    if tail:
        raise ValueError(f"tail: expected 0 with {drafter.name}, which drafts trees, given {tail}")


def needs_host(
    config: ChainConfig,
    levels: Sequence[BatchedLevel],
    drafter: BatchedDrafter | None,
    telling: Collection[int],
) -> str | None:
    """Why the host has to read what comes of each step; None: it need not.

    Args:
        telling: of `levels_with_hidden`.
    """
    parts: list[BatchedLevel | BatchedDrafter] = [*levels, *([] if drafter is None else [drafter])]
    devices = {part.device for part in parts}
    if len(devices) > 1:
        return f"levels lie on {', '.join(sorted(map(str, devices)))}"
    for part in parts:
        if not part.capabilities.keeps_lengths:
            return f"{part.name} keeps its lengths on the host"
    if drafter is not None:
        can = drafter.capabilities
        if can.trees and can.tree_size is None:
            return f"{config.names[-1]} drafts trees of any size"
        if can.hidden_layers and len(telling) < len(levels):
            return f"{config.names[-1]} reads hidden states that not every level gives"
    if round_plan(config.windows, config.rounds).steps is None:
        return "rounds are not bounded"
    return None
