"""The shipped chain: three small Llama-architecture models with one tokenizer, trained on GSM8K
and Tiny Shakespeare.

They are ordinary Hugging Face directories; `python -m polyspec_ext.tiny.train` makes them anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..chain import Chain

LEVELS = ("target", "middle", "drafter")
# Window of each shipped chain, by its levels: among the fastest of a small sweep on two CPU cores.
WINDOWS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("target",): (),
    ("target", "middle"): (6,),
    ("target", "drafter"): (5,),
    ("target", "middle", "drafter"): (6, 3),
}


def root() -> Path:
    """The folder of the models: beside this file, or where POLYSPEC_TINY points (a chain trained by
    oneself)."""
    return Path(os.environ.get("POLYSPEC_TINY") or Path(__file__).parent)


def path(level: str) -> Path:
    """Directory of "target", "middle" or "drafter".

    Raises:
        ValueError: no such level.
        FileNotFoundError: the model is not there.
    """
    if level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, given {level!r}")
    place = root() / level
    if not (place / "config.json").exists():
        raise FileNotFoundError(
            f"no model in {place}; train one with `python -m polyspec_ext.tiny.train --output "
            f"{root()}`"
        )
    return place


def prompt_of(question: str) -> str:
    """A question in the form the models were trained on."""
    return f"Question: {question.strip()}\nAnswer:"


def chain(
    levels: Sequence[str] = LEVELS, window: Sequence[int] | None = None, **options: Any
) -> Chain:
    """The shipped chain, or part of it. `options` are those of `Chain`."""
    from ..chain import Chain

    chosen = WINDOWS.get(tuple(levels)) if window is None else window
    return Chain([path(level) for level in levels], chosen, **options)
