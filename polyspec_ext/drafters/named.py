"""What the elements that a chain is given stand for: words and directories of drafters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..arguments import entries, shown
from ..levels import HuggingFaceLevel, Level
from ..levels.cpu_packed import can_pack
from ..quantization.stored import stored_w4
from . import eagle
from .base import BatchedDrafter, Drafter
from .first_layers import early_exit
from .model import DraftModel
from .ngram import NGramTable
from .prompt_lookup import PromptLookup
from .suffix import SuffixMatch

_KINDS = {"prompt-lookup": PromptLookup, "suffix": SuffixMatch, "ngram": NGramTable}
_COPY = "w4"
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


def element(
    thing: Any, above: Sequence[Any], name: str, dtype: torch.dtype | None = None
) -> tuple[Any, bool]:
    """What one of them stands for, and whether that is a drafter without a level: a `DraftModel`
    for its level, "prompt-lookup", "suffix", "ngram" and "early-exit:K" for those, "w4" for a level
    of the target's 4-bit copy over the target's cache (`quantization.stored`), the directory of an
    EAGLE head ("eagle:" in front of an id on the hub) for the head; anything else for itself.

    Args:
        above: the levels so far, target first.
        name: of `thing`, for messages.
        dtype: of a head that is loaded here; None: the target's.

    Raises:
        ValueError: an early exit of no model, or behind as many layers as it has not; a head of no
            model.
    """
    if isinstance(thing, DraftModel):
        thing = thing.level  # a chain makes its own, fitted to its vocabulary
    if isinstance(thing, str) and thing in _KINDS:
        thing = _KINDS[thing]()
    elif isinstance(thing, str) and (found := _EARLY_EXIT.fullmatch(thing)) is not None:
        target = _target(above, f"{name}: expected a target that is a Hugging Face model")
        try:
            thing = early_exit(target, int(found[1]))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    elif isinstance(thing, str) and thing == _COPY:
        target = _target(above, f"{name}: expected 'w4' below a Hugging Face model as the target")
        copy = stored_w4(target.model, name)
        pack = target.pack and can_pack(copy)
        thing = HuggingFaceLevel(
            copy, shares_cache_with=target, pack=pack, compile=target.compile, name=_COPY
        )
    elif isinstance(thing, str) and (near := _near(thing)) is not None:
        raise ValueError(f"{name}: expected a model or a drafter's word, given {thing!r}; {near}")
    elif (head := eagle.head_place(thing)) is not None:
        wanted = f"{name}: expected the EAGLE head {head!r} below a Hugging Face model as the"
        thing = eagle.Eagle.from_pretrained(head, _target(above, f"{wanted} target"), dtype=dtype)
    drafts = isinstance(thing, Drafter | BatchedDrafter) and not isinstance(thing, Level | type)
    return thing, drafts


# Words by what a user may write for them, without capitals, hyphens and spaces.
_WORDS = {word.replace("-", ""): repr(word) for word in _KINDS}
_WORDS.update(earlyexit="'early-exit:K' with K layers, as 'early-exit:2'",
              eagle="'eagle:' and an id or directory")  # fmt: skip


def _near(text: str) -> str | None:
    """What may have been meant by a word, if it is near one that is known: no model has such an id,
    and asking for one takes long."""
    if text.startswith("eagle:") and len(text) > len("eagle:"):
        return None
    if "/" in text or Path(text).exists():
        return None
    bare = re.sub(r"[^a-z]", "", text.lower().partition(":")[0])
    found = difflib.get_close_matches(bare, _WORDS, 1, 0.8)
    return f"did you mean {_WORDS[found[0]]}?" if found else None


def _target(above: Sequence[Any], wanted: str) -> HuggingFaceLevel:
    if above and isinstance(above[0], HuggingFaceLevel):
        return above[0]
    raise ValueError(f"{wanted}, given {shown(above[0]) if above else 'nothing above it'}")
