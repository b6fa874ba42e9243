"""Elements of a chain that are drafters, or levels with the target's weights: objects, words and
directories (`levels.ELEMENTS`)."""

from __future__ import annotations

import importlib
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
from ..levels.sources import W4, is_copy, original
from .base import BatchedDrafter, Drafter
from .checkpoint import HEADS, head_of, serves_heads
from .model import BEAM, DraftModel


def elements(levels: Any) -> list[Any]:
    """Return the elements of a chain as they were passed."""
    entries = listed("levels", levels, "models, the target first")
    if not entries:
        raise ValueError("levels: expected at least one model, given none")
    return entries


def is_drafter(thing: object) -> bool:
    """Return whether an object drafts without being a level."""
    return isinstance(thing, Drafter | BatchedDrafter) and not isinstance(thing, Level | type)


def _matcher(pattern: str) -> Callable[[object], bool]:
    return lambda element: isinstance(element, str) and re.fullmatch(pattern, element) is not None


@contextmanager
def _named(options: Options) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.name}: {error}") from error


def _load_copy(word: str, options: Options) -> Any:
    """Load a copy of a model with 4-bit weights; "w4" without a model copies the target and shares
    its cache."""
    from ..quantization import stored_w4  # most chains have no copy

    name = options.name
    if is_copy(word):
        # With the checkpoint's data type, unless the caller names another.
        dtype = options.dtype or "auto"
        whole = load_model(original(word), dtype, options.device, blocks=False, name=name)
        return _resolve(stored_w4(whole, name), options)
    target = options.target(f"{word!r} below a Hugging Face model as the target")
    copy = stored_w4(target.model, name)
    pack = target.pack and can_pack(copy)
    return HuggingFaceLevel(copy, shares_cache_with=target, pack=pack, name=word)


def _load_trimmed(word: str, options: Options) -> Any:
    from ..levels.stateful import StatefulLevel
    from ..quantization import trim

    _, size, source = word.split(":", 2)
    whole = ELEMENTS.resolve(source, replace(options, pack=False))
    if not isinstance(whole, HuggingFaceLevel | StatefulLevel):
        raise ValueError(f"{options.name}: expected a model to trim, given {source!r}")
    with _named(options):
        copy = trim(whole.model, None, int(size))
    return _resolve(copy, options)


def _load_translated(text: str, options: Options) -> Any:
    from .translated import TranslatedLevel

    if not options.above:
        raise ValueError(f"{options.name}: expected {text!r} below a target, given none above it")
    level = ELEMENTS.resolve(text.partition(":")[2], options)
    with _named(options):
        return TranslatedLevel(level, options.above[0])


def _load_paths(word: str, options: Options) -> Any:
    _, paths, source = word.split(":", 2)
    return _with_paths(source, int(paths), BEAM, options)


def _with_paths(element: Any, paths: int, beam: float, options: Options) -> Any:
    level = ELEMENTS.resolve(element, options)
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


def _load_early_exit(word: str, options: Options) -> HuggingFaceLevel:
    from ..quantization import early_exit

    target = options.target("a target that is a Hugging Face model")
    with _named(options):
        return early_exit(target, int(word.partition(":")[2]))


def _load_head(element: Any, options: Options) -> BatchedDrafter:
    kind, source = head_of(element) or ("mtp", element.partition(":")[2])
    label = f"the {HEADS[kind]} head {source!r}" if kind in HEADS else repr(element)
    target: Any = options.above[0] if options.above else None
    if not serves_heads(target):
        target = options.target(f"{label} below a Hugging Face model as the target")
    dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
    source = source or str(getattr(target.model, "name_or_path", "") or "")
    if not source:
        raise ValueError(
            f"{options.name}: expected a target with the checkpoint that it was loaded from, or "
            f"'mtp:' in front of that, given {element!r} below {target.name}"
        )
    name = {"eagle": "Eagle", "dflash": "DFlash", "mtp": "MTP"}[kind]
    head = getattr(importlib.import_module(f".{kind}", __package__), name)
    return cast(BatchedDrafter, head.from_pretrained(source, target, dtype=dtype))


def _make_lookup(word: str, options: Options) -> Drafter:
    from . import lookup

    return cast(Drafter, getattr(lookup, _LOOKUPS[word])())


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
        "'w4:' in front of an id or path, or 'w4' below the target",
        (ModelLevel,),
        lambda thing: is_copy(thing) or (isinstance(thing, str) and thing == W4),
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
        "'translated:' in front of an id or path",
        (Level,),
        _matcher(r"translated:.+"),
        _load_translated,
        ("'translated:MODEL', a draft model with another tokenizer",),
    ),
    *(
        Kind(repr(word), (Drafter,), _matcher(word), _make_lookup, (repr(word),))
        for word in _LOOKUPS
    ),
):
    ELEMENTS.register(_kind)
