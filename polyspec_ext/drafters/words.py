"""Elements of a chain that are drafters, or levels with the target's weights: objects, words and
directories (`levels.ELEMENTS`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from ..arguments import listed, shown
from ..levels import ELEMENTS, HuggingFaceLevel, Kind, Level, Options, load_model
from ..levels.fused import can_pack
from ..levels.models import ModelLevel
from ..levels.sources import COPIES, is_copy, original
from .base import BatchedDrafter, Drafter
from .checkpoint import HEADS, head_of, serves_heads
from .model import BEAM, DraftModel, early_exit


def elements(levels: Any) -> list[Any]:
    """Return the elements of a chain as they were passed."""
    things = listed("levels", levels, "models, the target first")
    if not things:
        raise ValueError("levels: expected at least one model, given none")
    return things


def is_drafter(thing: object) -> bool:
    """Return whether an object drafts without being a level."""
    return isinstance(thing, Drafter | BatchedDrafter) and not isinstance(thing, Level | type)


def _matcher(pattern: str) -> Callable[[object], bool]:
    return lambda thing: isinstance(thing, str) and re.fullmatch(pattern, thing) is not None


@contextmanager
def _named(options: Options) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.name}: {error}") from error


def _load_copy(thing: str, options: Options) -> Any:
    """Load a copy of a model with 4-bit or 8-bit weights; "w4" or "w8" without a model copies the
    target and shares its cache."""
    from ..quantization import copy_of  # most chains have no copy

    name = options.name
    if is_copy(thing):
        # With the checkpoint's data type, unless the caller names another.
        dtype = options.dtype or "auto"
        whole = load_model(original(thing), dtype, options.device, blocks=False, name=name)
        return _resolve(copy_of(thing.partition(":")[0], whole, name), options)
    target = options.target(f"{thing!r} below a Hugging Face model as the target")
    copy = copy_of(thing, target.model, name)
    pack = target.pack and can_pack(copy)
    return HuggingFaceLevel(copy, shares_cache_with=target, pack=pack, name=thing)


def _load_trimmed(thing: str, options: Options) -> Any:
    from ..levels.stateful import StatefulLevel
    from ..quantization import trim

    _, size, place = thing.split(":", 2)
    whole = ELEMENTS.resolve(place, replace(options, pack=False, choose=None))
    if not isinstance(whole, HuggingFaceLevel | StatefulLevel):
        raise ValueError(f"{options.name}: expected a model to trim, given {place!r}")
    with _named(options):
        copy = trim(whole.model, None, int(size))
    return _resolve(copy, options)


def _load_translated(thing: str, options: Options) -> Any:
    from .translated import RetokenizedDrafter, TranslatedLevel

    if not options.above:
        raise ValueError(f"{options.name}: expected {thing!r} below a target, given none above it")
    word, _, source = thing.partition(":")
    level = ELEMENTS.resolve(source, options)
    with _named(options):
        kind: Any = TranslatedLevel if word == "translated" else RetokenizedDrafter
        return kind(level, options.above[0])


def _load_paths(thing: str, options: Options) -> Any:
    _, paths, place = thing.split(":", 2)
    return _with_paths(place, int(paths), BEAM, options)


def _with_paths(thing: Any, paths: int, beam: float, options: Options) -> Any:
    level = ELEMENTS.resolve(thing, options)
    if paths == 1:
        return level
    if not isinstance(level, Level):
        raise ValueError(
            f"{options.name}: expected a model to draft {paths} paths, given {shown(level)}"
        )
    with _named(options):
        return DraftModel(level, paths=paths, beam=beam)


def _resolve(model: Any, options: Options) -> Any:
    return ELEMENTS.resolve(model, replace(options, dtype=None, device=None))


def _load_early_exit(thing: str, options: Options) -> HuggingFaceLevel:
    target = options.target("a target that is a Hugging Face model")
    with _named(options):
        return early_exit(target, int(thing.partition(":")[2]))


def _load_head(thing: Any, options: Options) -> BatchedDrafter:
    kind, place = head_of(thing) or ("mtp", thing.partition(":")[2])
    what = f"the {HEADS[kind]} head {place!r}" if kind in HEADS else repr(thing)
    target: Any = options.above[0] if options.above else None
    if not serves_heads(target):
        target = options.target(f"{what} below a Hugging Face model as the target")
    dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
    if kind == "eagle":
        from .eagle import Eagle

        return Eagle.from_pretrained(place, target, dtype=dtype)
    if kind == "dflash":
        from .dflash import DFlash

        return DFlash.from_pretrained(place, target, dtype=dtype)
    from .mtp import MTP

    place = place or str(getattr(target.model, "name_or_path", "") or "")
    if not place:
        raise ValueError(
            f"{options.name}: expected a target with the checkpoint that it was loaded from, or "
            f"'mtp:' in front of that, given {thing!r} below {target.name}"
        )
    return MTP.from_pretrained(place, target, dtype=dtype)


def _make_lookup(thing: str, options: Options) -> Drafter:
    from . import lookup

    return cast(Drafter, getattr(lookup, _LOOKUPS[thing])())


_LOOKUPS = {"prompt-lookup": "PromptLookup", "suffix": "SuffixMatch", "ngram": "NGramTable"}

# The last registered kind is tried first.
for _kind in (
    Kind(
        "a drafter, with propose",
        (Drafter, BatchedDrafter),
        is_drafter,
        lambda thing, options: thing,
    ),
    # A `DraftModel` with a single path is replaced by its level: a chain creates another
    # `DraftModel` for its vocabulary.
    Kind(
        "a DraftModel",
        (Level, DraftModel),
        lambda thing: isinstance(thing, DraftModel),
        lambda thing, options: _with_paths(thing.level, thing.paths, thing.beam, options),
    ),
    Kind(
        "'paths:K:' in front of an id or path",
        (Level, DraftModel),
        _matcher(r"paths:[1-9]\d*:.+"),
        _load_paths,
        ("'paths:K:MODEL' with K paths, as 'paths:3:DIR'",),
    ),
    Kind(
        "the directory of a head, or 'eagle:' or 'dflash:' and an id or directory",
        (BatchedDrafter,),
        lambda thing: bool(head_of(thing)),
        _load_head,
        ("'eagle:' or 'dflash:' and an id or directory",),
    ),
    Kind(
        "'mtp' below the target, or 'mtp:' and the id or directory of its checkpoint",
        (BatchedDrafter,),
        _matcher(r"mtp(:.+)?"),
        _load_head,
        ("'mtp', the multi-token prediction head of the target's checkpoint",),
    ),
    Kind(
        "'early-exit:K' with K layers",
        (Level,),
        _matcher(r"early-exit:\d+"),
        _load_early_exit,
        ("'early-exit:K' with K layers, as 'early-exit:2'",),
    ),
    Kind(
        "'w4:' or 'w8:' in front of an id or path, or 'w4' or 'w8' below the target",
        (ModelLevel,),
        lambda thing: is_copy(thing) or (isinstance(thing, str) and thing in COPIES),
        _load_copy,
    ),
    Kind(
        "'trim:N:' in front of an id or path",
        (ModelLevel,),
        _matcher(r"trim:\d+:.+"),
        _load_trimmed,
        ("'trim:N:MODEL' with N ids, as 'trim:32000:DIR'",),
    ),
    Kind(
        "'translated:' or 'retokenized:' in front of an id or path",
        (Level, BatchedDrafter),
        _matcher(r"(translated|retokenized):.+"),
        _load_translated,
        ("'translated:MODEL'", "'retokenized:MODEL', a draft model with another tokenizer"),
    ),
    *(
        Kind(repr(word), (Drafter,), _matcher(word), _make_lookup, (repr(word),))
        for word in _LOOKUPS
    ),
):
    ELEMENTS.register(_kind)
