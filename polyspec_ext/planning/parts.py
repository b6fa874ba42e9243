"""What a plan is made for: requests, and the elements that chains can be made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import arguments
from ..levels import batched
from ..levels.base import id_map_of
from ..sampling import Sampling
from ..validate import SEED_MAX

_SOURCE = re.compile(
    r"((?:w[48]:|eagle:|trim:\d+:)*)(.*)"
)  # prefixes, then a path, an id or a word


@dataclass(frozen=True)
class Request:
    """What the user will ask for, as `Chain.generate` takes it.

    Attributes:
        seed: of the first call that is measured.
        batch: prompts of a call.

    Raises:
        TypeError, ValueError: as `Chain.generate` has it; fewer than 2 tokens, or no prompt a call.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        made = {
            **{name: getattr(sampling, name) for name in sampling.__slots__},
            "max_new_tokens": arguments.integer("max_new_tokens", self.max_new_tokens, low=2),
            "seed": arguments.integer("seed", self.seed, SEED_MAX),
            "batch": arguments.integer("batch", self.batch, arguments.SIZE_MAX, 1),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def options(self, number: int = 0) -> dict[str, Any]:
        """As arguments of `Chain.generate`. Calls that are measured have seeds of their own, by
        `number`: with one and the same their texts would tell less."""
        own = {name: value for name, value in self.__dict__.items() if name != "batch"}
        return {**own, "seed": (self.seed + number) % 2**64}


@dataclass(frozen=True)
class Part:
    """An element of the chains that are compared."""

    thing: Any  # a `Level`, or a drafter
    name: str  # for people
    model: bool  # whether it is a level
    word: str | None = None  # its path, id or word; None: it was a Python object

    @property
    def choice(self) -> Any:
        """How it was found to run fastest (`Choice`); None where there was nothing to choose."""
        return getattr(self.thing, "choice", None)

    @property
    def source(self) -> str:
        """Its word, with an absolute path."""
        match = _SOURCE.fullmatch(str(self.word))
        assert match is not None
        loads = (self.model and self.reads_apart) or self.reads_states  # else a drafter's word
        path = Path(match[2])
        return match[1] + str(path.absolute() if loads and path.exists() else match[2])

    @property
    def verifies(self) -> bool:
        """Whether it can stand above another: a level that draws every id. Others are the last."""
        return self.model and id_map_of(batched(self.thing)).drawn is None

    @property
    def reads_apart(self) -> bool:
        """Whether its distributions can be read along a text; those of a level in another's cache,
        whose rounds alone tell what is accepted of it, cannot."""
        return bool(getattr(self.thing, "reads_apart", True))

    @property
    def trees(self) -> bool:
        """Whether it drafts trees, whose verification takes other times than a chain's."""
        return not self.model and bool(getattr(self._capabilities, "trees", False))

    @property
    def reads_states(self) -> bool:
        """Whether it drafts from the hidden states of the level above."""
        return not self.model and bool(getattr(self._capabilities, "hidden_layers", ()))

    @property
    def _capabilities(self) -> Any:
        return getattr(self.thing, "capabilities", None)

    def drafts_below(self, above: Part, target: Part) -> bool:
        """Whether it can stand below a part. A drafter that reads hidden states was made for the
        target's: it drafts for that, or for a copy in its cache."""
        return not self.reads_states or above == target or not above.reads_apart


def owners_above(parts: Sequence[Part]) -> bool:
    """Whether the owner of every cache that is shared stands above the levels that share it, as a
    chain wants it."""
    levels = [part.thing for part in parts if part.model]
    owners = [getattr(level, "cache_owner", level) for level in levels]
    return all(
        any(owner is above for above in levels[: place + 1]) for place, owner in enumerate(owners)
    )
