"""The requests that a plan is made for, and the elements that its chains are made of."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import arguments, progress
from ..drafters import DraftModel, elements, is_drafter
from ..drafters.checkpoint import head_of
from ..levels import batched
from ..levels.sources import is_copy, original
from ..sampling import Sampling
from ..tuning import Switch, level_for, pass_seconds
from ..validate import SEED_MAX

# Prefixes, then a path, an id, a word.
_WORDS = r"w[48]:|eagle:|dflash:|mtp:|translated:|retokenized:|(?:trim|paths):\d+:"
_SOURCE = re.compile(rf"((?:{_WORDS})*)(.*)")
_WIDTHS = (1, 4, 6)  # of a row in a pass, by which packing is chosen before windows are known
_MANY_IDS = 32000  # of a vocabulary from which on a draft with fewer is worth a try
_SHARE = 4  # such a draft has one of so many of the ids


@dataclass(frozen=True)
class Request:
    """Requests to come, as `Chain.generate` takes them.

    Attributes:
        seed: of the first call that is measured.
        batch: prompts of a call.

    Raises:
        TypeError, ValueError: as of `Chain.generate`; fewer than 2 tokens, or no prompt a call.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    batch: int = 1

    @property
    def sampling(self) -> Sampling:
        """How logits become a distribution."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def __post_init__(self) -> None:
        sampling = self.sampling
        checked = {
            **{name: getattr(sampling, name) for name in sampling.__slots__},
            "max_new_tokens": arguments.integer("max_new_tokens", self.max_new_tokens, low=2),
            "seed": arguments.integer("seed", self.seed, SEED_MAX),
            "batch": arguments.integer("batch", self.batch, arguments.SIZE_MAX, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def options(self, number: int = 0) -> dict[str, Any]:
        """Return arguments of `Chain.generate` for a measured call, whose seed goes by `number`."""
        options = {name: value for name, value in self.__dict__.items() if name != "batch"}
        return {**options, "seed": (self.seed + number) % 2**64}


@dataclass(frozen=True)
class Part:
    """An element of the chains that are compared.

    Attributes:
        thing: a `Level`, or a drafter.
        name: for people.
        model: whether it is a level.
        word: its path, id or word; None: it was a Python object.
    """

    thing: Any
    name: str
    model: bool
    word: str | None = None

    @property
    def choice(self) -> Any:
        """The `tuning.Choice` of how it runs fastest; None without one."""
        return getattr(self.thing, "choice", None)

    @property
    def source(self) -> str:
        """Its word, with an absolute path."""
        match = _SOURCE.fullmatch(str(self.word))
        assert match is not None
        drafts = self.reads_states or isinstance(self.thing, DraftModel)
        drafts = drafts or match[1].endswith("retokenized:")
        loads = (self.model and self.reads_apart) or drafts  # else a drafter's word
        path = Path(match[2])
        return match[1] + str(path.absolute() if loads and path.exists() else match[2])

    @property
    def reads_apart(self) -> bool:
        """Whether its distributions can be read along a text. Of a level in another's cache rounds
        alone tell what is accepted."""
        return bool(getattr(self.thing, "reads_apart", True))

    @property
    def trees(self) -> bool:
        """Whether it drafts trees, whose verification takes other times than a chain's."""
        return not self.model and bool(getattr(self._capabilities, "trees", False))

    @property
    def replays(self) -> int:
        """How many tokens it reads again behind a rejected block, within a pass, at most; 0: its
        state can be cut."""
        return batched(self.thing).capabilities.replays if self.model else 0

    @property
    def reads_states(self) -> bool:
        """Whether it drafts from the hidden states of the level above."""
        return not self.model and bool(getattr(self._capabilities, "hidden_layers", ()))

    @property
    def _capabilities(self) -> Any:
        return getattr(self.thing, "capabilities", None)

    def drafts_below(self, above: Part, target: Part) -> bool:
        """Return whether it can be below a part: one of trees below a level that reads them; one
        that reads hidden states below the target, or below a copy in the target's cache."""
        if self.trees and not batched(above.thing).capabilities.trees:
            return False
        return not self.reads_states or above == target or not above.reads_apart


def owners_above(parts: Sequence[Part]) -> bool:
    """Return whether the owner of every shared cache stands above the levels that share it."""
    levels = [part.thing for part in parts if part.model]
    owners = [getattr(level, "cache_owner", level) for level in levels]
    return all(
        any(owner is above for above in levels[: number + 1]) for number, owner in enumerate(owners)
    )


def considered(levels: Sequence[Any]) -> list[str]:
    """Return words for what `levels` do not name, target first.

    They are drafters without a model; the multi-token head in the target's directory; the target's
    4-bit copy in its cache; and, of every draft whose directory is given, its 4-bit copy, and the
    draft with a quarter of its many ids.
    """
    words = ["prompt-lookup", "suffix", "w4"]  # what takes no time to make comes first
    if isinstance(levels[0], str | Path) and Path(levels[0]).is_dir():
        words.insert(2, "mtp")
    for thing in levels[1:]:
        size = _vocabulary(original(thing))
        if size is not None:
            words += [] if is_copy(thing) else [f"w4:{thing}"]
            if size >= _MANY_IDS:
                words.append(f"trim:{size // _SHARE}:{thing}")
    return [word for word in words if word not in levels]


def _vocabulary(thing: Any) -> int | None:
    """Return the number of ids of the model in a directory; None without a model."""
    if not isinstance(thing, str | Path) or head_of(thing):
        return None
    try:
        config = json.loads((Path(thing) / "config.json").read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Loader:
    """Makes parts of elements; `batch` rows have their tokens in one pass."""

    pack: Switch
    batch: int = 1

    def part(self, thing: Any, name: str, above: Sequence[Any]) -> Part:
        """Return one that runs as is fastest for a few tokens of each row."""
        widths = [self.batch * width for width in _WIDTHS]
        thing = level_for(thing, widths, pack=self.pack, name=name, above=above)
        named = str(getattr(thing, "name", type(thing).__name__))
        return Part(thing, named, not is_drafter(thing))

    def parts(self, levels: Sequence[Any]) -> list[Part]:
        """Return the parts of what `ps.plan` was given.

        Raises:
            TypeError, ValueError: as of `Chain`.
        """
        parts: list[Part] = []
        for number, thing in enumerate(elements(levels)):
            name, loads = f"levels[{number}]", isinstance(thing, str | Path)
            if loads:
                progress.note(f"plan: loading {thing}")
            part = self.part(thing, name, [part.thing for part in parts])
            if not part.model and number == 0:
                raise TypeError(f"{name}: expected a model, given {type(part.thing).__name__}")
            parts.append(replace(part, word=str(thing)) if loads else part)
        return _named(parts)

    def with_considered(
        self, levels: Sequence[Any], parts: Sequence[Part], limit: float
    ) -> list[Part]:
        """Return `parts` of `levels`, and those of `considered` that can be made; none is begun
        after `limit` seconds."""
        parts, began = list(parts), time.perf_counter()
        words = considered(levels)
        for number, word in enumerate(words):
            if time.perf_counter() - began > limit:
                late = ", ".join(words[number:])
                progress.note(f"plan: no time for {late}; more seconds are more time")
                break
            try:
                progress.note(f"plan: making {word}")
                part = self.part(word, word, [parts[0].thing])
            except ValueError:  # nothing to quantise, or a target without a cache to share
                continue
            parts.append(replace(part, name=word if part.model else part.name, word=word))
        return _named(parts)


def _named(parts: Sequence[Part]) -> list[Part]:
    names = [part.name for part in parts]
    return [
        part if names.count(part.name) == 1 else replace(part, name=f"{part.name} ({n})")
        for n, part in enumerate(parts)
    ]


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Return the target, others that verify from the slowest down, then what only drafts."""
    target, others = parts[0], [part for part in parts[1:] if part.model]
    apart = [part for part in others if part.reads_apart]
    cost = {}
    if len(others) > 1 and apart:
        clock = time.perf_counter  # of all that is measured here
        times = pass_seconds([part.thing for part in apart], (1,), repeats=6, clock=clock)
        cost = {part.name: seconds[1] for part, seconds in zip(apart, times, strict=True)}
    # What shares the target's cache is a copy of it.
    others.sort(key=lambda part: -cost.get(part.name, float("inf")))
    return [target, *others, *(part for part in parts[1:] if not part.model)]
