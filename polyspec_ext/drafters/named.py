"""What stands for a drafter, or for a level of the target's own weights, in a chain: objects, words
and directories (`levels.ELEMENTS`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from ..arguments import entries, shown
from ..levels import ELEMENTS, HuggingFaceLevel, Level, Loader, Options, load_model
from ..levels.cpu_packed import can_pack
from ..quantization.stored import WORDS, copy_of, is_copy, original
from ..quantization.trimming import trim
from . import eagle
from .base import BatchedDrafter, Drafter
from .first_layers import early_exit
from .lookup import NGramTable, PromptLookup, SuffixMatch
from .model import DraftModel

_TRIMMED = re.compile(r"trim:(\d+):(.+)")
_EARLY_EXIT = re.compile(r"early-exit:(\d+)")


def elements(levels: Any) -> list[Any]:
    """What a chain is made of, as it was given.

    Raises:
        TypeError: no container.
        ValueError: nothing is in it.
    """
    things = entries("levels", levels)
    if things is None:
        raise TypeError(
            f"levels: expected a list of models, the target first, given {shown(levels)}"
        )
    if not things:
        raise ValueError("levels: expected at least one model, given none")
    return things


def is_drafter(thing: object) -> bool:
    """Whether it drafts without being a level."""
    return isinstance(thing, Drafter | BatchedDrafter) and not isinstance(thing, Level | type)


class _OwnDrafter(Loader):
    """A drafter, which is one already."""

    expects = "a drafter, with propose"
    gives = (Drafter, BatchedDrafter)

    def matches(self, thing: object) -> bool:
        return is_drafter(thing)

    def load(self, thing: Any, options: Options) -> Any:
        return thing


class _DraftModel(Loader):
    """A `DraftModel` stands for its level: a chain makes its own, fitted to its vocabulary."""

    expects = "a DraftModel"
    gives = (Level,)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, DraftModel)

    def load(self, thing: DraftModel, options: Options) -> Any:
        return ELEMENTS.resolve(thing.level, options)


class _Word(Loader):
    """A word for a drafter that needs nothing else."""

    gives = (Drafter,)

    def __init__(self, **kinds: type) -> None:
        self._kinds = {name.replace("_", "-"): kind for name, kind in kinds.items()}
        self.expects = " or ".join(map(repr, self._kinds))
        self.words = tuple(map(repr, self._kinds))

    def matches(self, thing: object) -> bool:
        return isinstance(thing, str) and thing in self._kinds

    def load(self, thing: str, options: Options) -> Any:
        return self._kinds[thing]()


class _Copy(Loader):
    """``w4:PLACE``, the 4-bit copy of the model there; "w4", that of the target over its cache;
    with "w8" the 8-bit one."""

    expects = "'w4:' or 'w8:' in front of an id or path, or 'w4' or 'w8' below the target"
    gives = (HuggingFaceLevel,)

    def matches(self, thing: object) -> bool:
        return is_copy(thing) or (isinstance(thing, str) and thing in WORDS)

    def load(self, thing: str, options: Options) -> Any:
        name = options.name
        if is_copy(thing):
            # With the checkpoint's own data type, unless another is given.
            place, dtype = original(thing), options.dtype or "auto"
            whole = load_model(place, dtype, options.device, blocks=False, name=name)
            copy = copy_of(thing.partition(":")[0], whole, name)
            return ELEMENTS.resolve(copy, replace(options, dtype=None, device=None))
        target = options.target(f"{thing!r} below a Hugging Face model as the target")
        copy = copy_of(thing, target.model, name)
        pack = target.pack and can_pack(copy)
        return HuggingFaceLevel(copy, shares_cache_with=target, pack=pack, name=thing)


class _Trimmed(Loader):
    """``trim:N:MODEL``: a model with a head of its N lowest ids."""

    expects = "'trim:N:' in front of an id or path"
    words = ("'trim:N:MODEL' with N ids, as 'trim:32000:DIR'",)
    gives = (HuggingFaceLevel,)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, str) and _TRIMMED.fullmatch(thing) is not None

    def load(self, thing: str, options: Options) -> Any:
        _, size, place = thing.split(":", 2)
        plain = replace(options, pack=False, choose=None)
        whole = ELEMENTS.resolve(place, plain)
        if not isinstance(whole, HuggingFaceLevel):
            raise ValueError(f"{options.name}: expected a model to trim, given {place!r}")
        try:
            copy = trim(whole.model, None, int(size))
        except ValueError as error:
            raise ValueError(f"{options.name}: {error}") from error
        return ELEMENTS.resolve(copy, replace(options, dtype=None, device=None))


class _EarlyExit(Loader):
    """The target's first layers, as a level."""

    expects = "'early-exit:K' with K layers"
    words = ("'early-exit:K' with K layers, as 'early-exit:2'",)
    gives = (Level,)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, str) and _EARLY_EXIT.fullmatch(thing) is not None

    def load(self, thing: str, options: Options) -> Any:
        target = options.target("a target that is a Hugging Face model")
        try:
            return early_exit(target, int(thing.partition(":")[2]))
        except ValueError as error:
            raise ValueError(f"{options.name}: {error}") from error


class _EagleHead(Loader):
    """The directory of an EAGLE head for the target, or "eagle:" in front of it or of an id."""

    expects = "the directory of an EAGLE head, or 'eagle:' and an id or directory"
    words = ("'eagle:' and an id or directory",)
    gives = (eagle.Eagle,)

    def matches(self, thing: object) -> bool:
        return bool(eagle.head_place(thing))

    def load(self, thing: Any, options: Options) -> Any:
        place = eagle.head_place(thing)
        assert place is not None
        target = options.target(
            f"the EAGLE head {place!r} below a Hugging Face model as the target"
        )
        dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
        return eagle.Eagle.from_pretrained(place, target, dtype=dtype)


_LOADERS = (
    _OwnDrafter(),
    _DraftModel(),
    _EagleHead(),
    _EarlyExit(),
    _Copy(),
    _Trimmed(),
    _Word(prompt_lookup=PromptLookup, suffix=SuffixMatch, ngram=NGramTable),
)
for _loader in _LOADERS:
    ELEMENTS.register(_loader)
