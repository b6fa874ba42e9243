"""Levels: the models of a chain, behind four names, and Hugging Face causal models as levels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from . import progress
from .level_hf import HuggingFaceLevel, level_of

__all__ = ["HuggingFaceLevel", "Level", "as_level", "device_of", "load"]


@runtime_checkable
class Level(Protocol):
    """One model of a chain and its cache.

    A level holds the keys and values of one batch of sequences. `prefill` starts a batch,
    `forward` appends to it, `rollback` cuts it. The four names below do for one sequence, B = 1. A
    level with `supports_batches = True` takes more, as `HuggingFaceLevel` does::

        prefill(tokens [B, T], counts=None)     row b reads its first counts[b] tokens
        forward(tokens [B, T], keep, counts=None, first=None)
        select(rows)                            keep these rows, in that order

    ``Level(model, ...)`` itself is short for ``HuggingFaceLevel(model, ...)``, whose arguments it
    takes: ``Level(copy, shares_cache_with=target)``, ``Level(draft, streaming=256)``. (A type
    checker that makes no protocols wants the long name.)

    Optional attributes: `name` (for messages), `device` (of tokens and logits; default the CPU),
    `max_length` (longest context, None: no limit), `eos_token_ids`, `tokenizer()`,
    `reserve(tokens)` (before `prefill`: the longest row that the batch will have).
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # Classes that name the protocol as their base are made as any other.
        return HuggingFaceLevel(*args, **options) if cls is Level else super().__new__(cls)

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids the level reads are below it."""
        ...

    def prefill(self, tokens: torch.Tensor) -> None:
        """Forget everything and read `tokens`, ``[B, T]`` int64, T >= 0. No logits are wanted."""
        ...

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append `tokens`, ``[B, T]`` int64, T >= 1, and return the next-token logits behind the
        last `keep` <= T of them: ``[B, keep, vocab_size]``, float32, bfloat16 or float16, unit
        stride along the vocabulary."""
        ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence b; never more than were appended."""
        ...


def device_of(level: Level) -> torch.device:
    """Where a level takes its tokens and leaves its logits."""
    return torch.device(getattr(level, "device", "cpu"))


def load(
    place: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
) -> HuggingFaceLevel:
    """A level from a model id or directory. `dtype` defaults to float32 on the CPU, where half
    precision is slow, and to the checkpoint's own elsewhere. `pack`, `compile`: see
    `HuggingFaceLevel`."""
    from transformers import AutoModelForCausalLM

    where = torch.device(device or "cpu")
    wanted = dtype or (torch.float32 if where.type == "cpu" else "auto")
    with progress.loading():
        model = AutoModelForCausalLM.from_pretrained(str(place), dtype=wanted)
    return HuggingFaceLevel(model.to(where).eval(), pack=pack, compile=compile)


def as_level(
    thing: Any,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
) -> Level:
    """A chain's element as a level: a Level as it is, a model wrapped, an id or path loaded.
    `pack`, `compile`: of the levels made here (`HuggingFaceLevel`).

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(thing, str | Path):
        return load(thing, dtype, device, pack=pack, compile=compile)
    if isinstance(thing, Level):
        return thing
    if isinstance(thing, torch.nn.Module) and hasattr(thing, "config"):
        return level_of(thing, pack, compile)
    raise TypeError(
        "expected a Hugging Face causal model, a model id or path, or an object with vocab_size, "
        "prefill, forward and "
        f"rollback, given {type(thing).__name__}"
    )
