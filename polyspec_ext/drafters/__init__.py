"""Drafters: the lowest level of a chain, which proposes tokens. Each is in a file, and public as
`polyspec_ext.NAME`; here are their contracts, and the elements of a chain (`resolve`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import rooms
from ..arguments import listed, shown
from ..levels.sources import Level, Options, level_for, load_path, require_level
from .base import (
    BatchedDrafter,
    Context,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    HiddenStates,
    Proposal,
    RowBuffer,
    levels_of,
)
from .model import DraftModel

__all__ = [
    "BatchedDrafter", "Context", "DraftBlock", "DraftInput", "DraftModel", "Drafter",
    "DrafterCapabilities", "HiddenStates", "Proposal", "RowBuffer", "elements", "is_drafter",
    "levels_of", "resolve", "with_paths",
]  # fmt: skip


def elements(levels: Any) -> list[Any]:
    """Return the elements of a chain as they were passed."""
    entries = listed("levels", levels, "models, the target first")
    if not entries:
        raise ValueError("levels: expected at least one model, given none")
    return entries


def is_drafter(thing: object) -> bool:
    """Return whether an object drafts without being a level."""
    return isinstance(thing, Drafter | BatchedDrafter) and not isinstance(thing, Level | type)


def resolve(thing: Any, options: Options) -> Any:
    """Return the level or drafter of an element of a chain.

    Raises:
        TypeError: `thing` is no element; the message lists the accepted elements.
        TypeError, ValueError: it cannot be loaded; begins with ``options.name``.
    """
    has_words = rooms.has("words")
    if isinstance(thing, str | Path):
        named = rooms.words.named_element(thing, options) if has_words else None
        return load_path(thing, options) if named is None else named
    if isinstance(thing, DraftModel):
        # With a single path it is its level: a chain creates a `DraftModel` for its vocabulary.
        return with_paths(thing.level, thing.paths, thing.beam, options)
    if is_drafter(thing):
        return thing
    if isinstance(thing, Level) and not isinstance(thing, type):
        return require_level(thing, options)
    if isinstance(thing, torch.nn.Module) and hasattr(thing, "config"):
        return level_for(thing, options)
    forms = [word.form for word in rooms.words.WORDS.values()] if has_words else []
    raise TypeError(
        f"{options.name}: expected one of: a Hugging Face causal model; an object with "
        f"vocab_size, prefill, forward and rollback; a model id, or the directory or GGUF file of "
        f"a model; a drafter, with propose; {'; '.join(forms)}; given {shown(thing)}"
    )


def with_paths(element: Any, paths: int, beam: float, options: Options) -> Any:
    """Return the level of an element; a drafter with several `paths` of this level."""
    level = resolve(element, options)
    if paths == 1:
        return level
    if not isinstance(level, Level):
        raise ValueError(
            f"{options.name}: expected a model to draft {paths} paths, given {shown(level)}"
        )
    try:
        return DraftModel(level, paths=paths, beam=beam)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.name}: {error}") from error
