"""What a chain could be made of beside the models at hand: copies of them, and drafters without a
model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..drafters.eagle import head_place
from ..quantization.stored import is_copy, original

_MANY = 32000  # ids of a vocabulary from which on a draft with fewer is worth a try
_SHARE = 4  # such a draft has one of so many of the ids


def considered(levels: Sequence[Any]) -> list[str]:
    """Words for drafters without a model; for the target's 4-bit copy in its cache; and of every
    draft whose directory is given, or of which a copy is, for its 4-bit copy and for the draft with
    a quarter of its ids, where it has many. None of them is among `levels`, target first."""
    words = ["prompt-lookup", "suffix", "w4"]  # what takes no time to make comes first
    for thing in levels[1:]:
        size = _vocabulary(original(thing))
        if size is not None:
            words += [] if is_copy(thing) else [f"w4:{thing}"]
            if size >= _MANY:
                words.append(f"trim:{size // _SHARE}:{thing}")
    return [word for word in words if word not in levels]


def _vocabulary(thing: Any) -> int | None:
    """Ids of the model in a directory; None: there is none."""
    if not isinstance(thing, str | Path) or head_place(thing):
        return None
    file = Path(thing) / "config.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        return int(told["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
