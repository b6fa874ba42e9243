"""How a level's model runs fastest on this processor: with packed weights or not.

What is faster on one processor is slower on the next, so the candidates are timed for a moment
where they are to run, and the answer is kept for the next process (`store`). Whichever is chosen,
the level's logits are those of its model in the data type that is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from . import processor
from .profile import REPEATS, pass_seconds
from .store import default_store

if TYPE_CHECKING:
    from ..levels import Level

_Level = TypeVar("_Level", bound="Level")
Switch = bool | Literal["auto"]
# A candidate must be faster by so much than those before it: less is within the noise, and the
# earlier ones are simpler.
MARGIN = 0.03
# What else runs on a machine makes times that do not repeat, or more than any processor takes.
_REPEATS = 1.5  # so many times one measurement may be the other
_LONGEST = (0.1, 1e-8)  # seconds of a pass, and as many for each byte of weights and token
SCHEMA = 5  # of what is kept, and of the products it was timed with


@dataclass(frozen=True)
class LevelConfig:
    """How a level's model runs; `pack` is that of `HuggingFaceLevel`."""

    dtype: torch.dtype
    pack: bool = False

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + " packed" * self.pack


@dataclass(frozen=True)
class Choice:
    """The fastest candidate, and the times that say so."""

    config: LevelConfig
    # Of one pass, by candidate and number of tokens; empty where there was no choice.
    seconds: Mapping[LevelConfig, Mapping[int, float]]
    cached: bool = False  # they were measured earlier
    steady: bool = True  # they repeated and are plausible; only then they are kept

    def __str__(self) -> str:
        """One line."""
        if not self.seconds:
            return f"{self.config} (as given)"
        each = [
            f"{config} " + "/".join(f"{value * 1e3:.2f}" for value in times.values())
            for config, times in self.seconds.items()
        ]
        sizes = "/".join(map(str, next(iter(self.seconds.values()))))
        when = "measured earlier" if self.cached else "measured now"
        when += "" if self.steady else ", not kept: the machine is busy"
        return f"{self.config} (ms per pass of {sizes} tokens, {when}: {', '.join(each)})"


def widths_of(window: Sequence[int]) -> list[tuple[int, ...]]:
    """Tokens of the passes of each level of a chain, target first: one where it decodes or drafts,
    a window and one more where it verifies."""
    return [*((1, size + 1) if size else (1,) for size in window), (1,)]


def choose(
    make: Callable[[LevelConfig], _Level],
    candidates: Sequence[LevelConfig],
    widths: Sequence[int],
    *,
    shape: str = "",
) -> tuple[_Level, Choice]:
    """Make the level whose passes take the least time, one of each width added up.

    Args:
        make: a level as a configuration says. A candidate for which it, or the level's first
            passes, raise an error is left out, unless none is left.
        candidates: the simplest first; a later one must be faster by `MARGIN`.
        widths: tokens of the passes, each >= 1.
        shape: tells models apart whose passes cost differently.

    All is measured twice. The answer is kept in `default_store`, by processor, instruction sets,
    threads, versions and all of the above, if both times agree and are plausible.
    """
    if len(candidates) == 1:
        return make(candidates[0]), Choice(candidates[0], {})
    store = default_store()
    key = {
        "schema": SCHEMA,
        **processor.facts(),
        "shape": shape,
        "widths": list(widths),
        "candidates": [str(config) for config in candidates],
    }
    known = _read(store.get(key), candidates)
    if known is not None:
        try:
            return make(known.config), known
        except (ValueError, RuntimeError):  # what could be made then cannot be made now
            pass
    level, choice = _fastest(make, candidates, widths)
    if choice.steady:
        measured = {str(config): dict(times) for config, times in choice.seconds.items()}
        store.put(key, {"chosen": str(choice.config), "measured": measured})
    return level, choice


def _fastest(
    make: Callable[[LevelConfig], _Level], candidates: Sequence[LevelConfig], widths: Sequence[int]
) -> tuple[_Level, Choice]:
    processor.note_load()
    made: dict[LevelConfig, _Level] = {}
    errors: list[Exception] = []
    for config in candidates:
        try:
            level = make(config)
            pass_seconds([level], widths, repeats=1)
            made[config] = level
        except Exception as error:  # oneDNN's: any other candidate will do
            errors.append(error)
    if not made:
        raise errors[-1]
    twice = [
        dict(
            zip(made, pass_seconds(list(made.values()), widths, repeats=REPEATS // 2), strict=True)
        )
        for _ in range(2)
    ]
    first, second = twice
    seconds = {
        config: {width: min(first[config][width], second[config][width]) for width in widths}
        for config in made
    }
    best = _best(seconds)
    steady = _best(first) == _best(second) == best and all(
        abs(math.log(first[config][width] / second[config][width])) < math.log(_REPEATS)
        and seconds[config][width] < _most_seconds(level, width)
        for config, level in made.items()
        for width in widths
    )
    return made[best], Choice(best, seconds, steady=steady)


def _best(seconds: Mapping[LevelConfig, Mapping[int, float]]) -> LevelConfig:
    best, *later = seconds
    for config in later:
        if sum(seconds[config].values()) < (1 - MARGIN) * sum(seconds[best].values()):
            best = config
    return best


def _most_seconds(level: Level, width: int) -> float:
    model = getattr(level, "model", None)
    if not isinstance(model, torch.nn.Module):
        return math.inf
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return _LONGEST[0] + _LONGEST[1] * size * width


def _read(value: Any, candidates: Sequence[LevelConfig]) -> Choice | None:
    """Return what `choose` has stored; None where `value` is something else."""
    configs = {str(config): config for config in candidates}
    try:
        seconds = {
            configs[name]: {int(width): float(one) for width, one in times.items()}
            for name, times in value["measured"].items()
        }
        return Choice(configs[value["chosen"]], seconds, cached=True)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
