"""The drafters that a chain knows by a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..arguments import shown
from ..levels import HuggingFaceLevel
from .first_layers import early_exit
from .ngram import NGramTable
from .prompt_lookup import PromptLookup
from .suffix import SuffixMatch

_KINDS = {"prompt-lookup": PromptLookup, "suffix": SuffixMatch, "ngram": NGramTable}
_EARLY_EXIT = re.compile(r"early-exit:(\d+)")


def drafter_named(word: Any, above: Sequence[Any], name: str) -> Any:
    """The drafter or level that `word` stands for: "prompt-lookup", "suffix", "ngram" or
    "early-exit:K"; anything else is returned as it is.

    Args:
        above: the chain's levels so far, target first.
        name: of `word`, for messages.

    Raises:
        ValueError: an early exit of no model, or behind as many layers as it has not.
    """
    if not isinstance(word, str):
        return word
    if word in _KINDS:
        return _KINDS[word]()
    found = _EARLY_EXIT.fullmatch(word)
    if found is None:
        return word
    if not above or not isinstance(above[0], HuggingFaceLevel):
        what = shown(above[0]) if above else "none"
        raise ValueError(f"{name}: expected a target that is a Hugging Face model, given {what}")
    try:
        return early_exit(above[0], int(found[1]))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
