"""The form of a chain, the abilities that it requires of levels and drafter, and whether the host
has to read between their steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..drafters.base import BatchedDrafter
from ..levels.base import BatchedLevel, IdMap
from ..ops import unchecked


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that draw tokens, as a chain calls them.

    Attributes:
        draw, verify, verify_tree: as of `ops.unchecked`. Exact enumeration and measurements
            replace them.
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
    def levels(self) -> int:  # n
        return len(self.names)


Member = BatchedLevel | BatchedDrafter

# Attributes of a level or drafter, by the capability that states them.
_STATED = {
    "continues": ("open", "extend", "admit", "save", "restore"),
    "keeps_lengths": ("reserve_span", "note_lengths"),
}


def _refuse(name: str, expected: str, given: str) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, given {given}")


def check(
    config: ChainConfig, levels: Sequence[BatchedLevel], drafter: BatchedDrafter | None
) -> set[int]:
    """Refuse levels and a drafter that cannot form a chain.

    Returns:
        Numbers of the levels whose hidden states the drafter is told.

    Raises:
        ValueError: names the level, the drafter or `tail`, and the missing ability.
    """
    target, drawn = levels[0], config.id_maps[0].drawn
    if drawn is not None:
        drawing = f"a target that draws all of its {target.vocab_size} ids"
        _refuse(target.name, drawing, f"one that draws {len(drawn)}; only levels below it may")
    parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
    for part in parts:
        _require_stated(part)
    for i in range(1, config.levels):
        if config.id_maps[i].entries_below(config.vocab_sizes[i - 1]) == 0:
            drawing = f"a level that draws some id of {config.names[i - 1]}, the level above it"
            _refuse(config.names[i], drawing, "one that draws none of them")
    if drafter is None:
        return set()
    if drafter.capabilities.trees:
        above_it = levels[-1]
        if not above_it.capabilities.trees:
            reason = getattr(above_it, "no_trees", f"{type(above_it).__name__} does not")
            reading = f"a level that reads trees, as {drafter.name} drafts them"
            _refuse(above_it.name, reading, f"one that does not: {reason}")
        if config.tail:
            _refuse("tail", f"0 with {drafter.name}, which drafts trees", str(config.tail))
    return _levels_with_hidden(levels, drafter)


def _require_stated(part: Member) -> None:
    for capability, names in _STATED.items():
        holders = part, getattr(part, "level", part)  # a wrapper has them all
        lacks = [name for name in names if not all(hasattr(one, name) for one in holders)]
        if lacks and getattr(part.capabilities, capability):
            stated = f"an attribute `{lacks[0]}` beside capabilities with `{capability}`"
            _refuse(part.name, stated, "none")


def _levels_with_hidden(levels: Sequence[BatchedLevel], drafter: BatchedDrafter) -> set[int]:
    """Return the numbers of the levels whose hidden states have the drafter's width and layers. The
    target's must, and every level must give some."""
    wanted, numbers = drafter.capabilities, set()
    for number, level in enumerate(levels if wanted.hidden_layers else (), 1):
        can = level.capabilities
        if not can.hidden_states:
            giving = f"a level that gives hidden states, as {drafter.name} wants them"
            _refuse(level.name, giving, "one that does not")
        fits = len({wanted.hidden_size, can.hidden_size} - {None}) < 2
        deepest = max(wanted.hidden_layers)
        deep = can.num_layers is None or can.num_layers >= deepest
        if fits and deep:
            numbers.add(number)
        elif number == 1:
            kind = f"of {wanted.hidden_size} values" if deep else f"of layer {deepest}"
            given = str(can.hidden_size) if deep else f"{can.num_layers} layers"
            _refuse(level.name, f"hidden states {kind}, as {drafter.name} reads them", given)
    return numbers


def needs_host(
    config: ChainConfig,
    levels: Sequence[BatchedLevel],
    drafter: BatchedDrafter | None,
    telling: Collection[int],
    bounded: bool,
) -> str | None:
    """Return why the host has to read between steps; None: it need not.

    Args:
        telling: of `check`.
        bounded: whether the order of the steps is known before the tokens are.
    """
    parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
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
    return None if bounded else "rounds are not bounded"
