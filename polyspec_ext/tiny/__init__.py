"""The shipped chain: three small Llama-architecture models with one tokenizer, trained on GSM8K
and Tiny Shakespeare.

They are ordinary Hugging Face directories; `python -m polyspec_ext.tiny.train` makes them anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import progress

if TYPE_CHECKING:
    from ..chain import Chain
    from ..levels import HuggingFaceLevel

LEVELS = ("target", "middle", "drafter")
# Window of each shipped chain, by its levels: among the fastest of a small sweep on two CPU cores,
# for one prompt and for batches of about eight, where a verified token costs more and rows that
# wait for each other cost time.
WINDOWS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("target",): (),
    ("target", "middle"): (6,),
    ("target", "drafter"): (5,),
    ("target", "middle", "drafter"): (5, 3),
}
# Rounds of the middle for one prompt: a third one where the first two have not filled the window.
ROUNDS: dict[tuple[str, ...], tuple[int, ...]] = {("target", "middle", "drafter"): (3,)}
BATCH_WINDOWS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("target",): (),
    ("target", "middle"): (3,),
    ("target", "drafter"): (3,),
    ("target", "middle", "drafter"): (4, 1),
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


def levels(
    names: Sequence[str] = LEVELS,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    pack: bool | None = None,
    compile: bool = False,
) -> dict[str, HuggingFaceLevel]:
    """The shipped models as levels, by name.

    Args:
        dtype: of all of them. None: float32; on the CPU the draft levels in bfloat16, which their
            checkpoints hold, where the processor multiplies it. A draft's dtype costs speed only,
            never exactness.
        pack: None packs the weights on the CPU, where torch has oneDNN.
    """
    from ..levels import load

    where = torch.device(device or "cpu")
    on_cpu = where.type == "cpu"
    if pack is None:
        pack = on_cpu and torch.backends.mkldnn.is_available()
    half = on_cpu and _multiplies_bfloat16()
    made = {}
    for name in names:
        own = torch.bfloat16 if half and name != LEVELS[0] else torch.float32
        with progress.loading(shown=False):  # which takes a blink
            made[name] = load(path(name), dtype or own, where, pack=pack, compile=compile)
    return made


def _multiplies_bfloat16() -> bool:
    """Elsewhere it is emulated, and slower than float32."""
    tell = getattr(torch.cpu, "get_capabilities", None)  # not in every release
    found = {} if tell is None else tell()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def chain(
    names: Sequence[str] = LEVELS,
    window: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    pack: bool | None = None,
    compile: bool = False,
    **options: Any,
) -> Chain:
    """The shipped chain, or part of it: `levels`, and the other options of `Chain`."""
    from ..chain import Chain

    if window is None:
        window = WINDOWS.get(tuple(names))
        if options.get("rounds") is None:
            options["rounds"] = ROUNDS.get(tuple(names))
    made = levels(names, dtype=dtype, device=device, pack=pack, compile=compile)
    return Chain(list(made.values()), window, **options)
