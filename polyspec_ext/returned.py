"""What a level returns, checked before it is used: it may be a user's own.

Errors name the level, what its contract (`Level`) expects, and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .validate import LOGITS_DTYPES, wrong_kind


def require_output(name: str, output: Any) -> None:
    """Require a `LevelOutput` of ``forward`` of level `name`.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(output, tuple) or not 1 <= len(output) <= 3:
        wrong_kind(name, "forward to return a LevelOutput", output)


def require_logits(
    name: str, logits: Any, batch: int, keep: int, vocab_size: int, device: torch.device
) -> None:
    """Require logits ``[batch, keep, vocab_size]`` of ``forward`` of level `name`.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape, device, layout or stride.
    """
    if not isinstance(logits, torch.Tensor) or logits.dtype not in LOGITS_DTYPES:
        wrong_kind(name, "forward to return float32, bfloat16 or float16 logits", logits)
    if logits.shape != (batch, keep, vocab_size):
        raise ValueError(
            f"{name}: expected forward to return logits of shape [B, keep, vocab_size] = "
            f"[{batch}, {keep}, {vocab_size}], given {list(logits.shape)}"
        )
    if logits.device != device and not _same(logits.device, device):
        raise ValueError(
            f"{name}: expected forward to return logits on the level's device, {device}, given "
            f"{logits.device}"
        )
    if logits.layout != torch.strided:
        raise ValueError(
            f"{name}: expected forward to return dense logits, given layout {logits.layout}"
        )
    if vocab_size > 1 and logits.stride(2) != 1:
        raise ValueError(
            f"{name}: expected forward to return logits of unit stride along the vocabulary, given "
            f"stride {logits.stride(2)}; call .contiguous() on them"
        )


def require_hidden(name: str, hidden: Any, layers: Sequence[int], shape: Sequence[int]) -> None:
    """Require hidden states ``[B, T, H]`` by layer of a pass of level `name` over tokens of `shape`
    [B, T].

    Raises:
        TypeError: no mapping, or no floating-point tensors.
        ValueError: a layer is missing, or has another shape.
    """
    if not isinstance(hidden, Mapping):
        wrong_kind(name, "hidden states by layer", hidden)
    for layer in layers:
        states = hidden.get(layer)
        if not isinstance(states, torch.Tensor) or not states.is_floating_point():
            wrong_kind(name, f"hidden states of layer {layer}", states)
        if states.dim() != 3 or tuple(states.shape[:2]) != tuple(shape):
            raise ValueError(
                f"{name}: expected hidden states of shape [B, T, H] = [{shape[0]}, {shape[1]}, H] "
                f"of layer {layer}, given {list(states.shape)}"
            )


def call(name: str, level: Any, method: str, *arguments: Any) -> None:
    """Call a method of level `name` that returns None. A result would be a message that nobody
    reads: a coroutine, False, other lengths than asked for.

    Raises:
        TypeError: it returned something.
    """
    result = getattr(level, method)(*arguments)
    if result is not None:
        wrong_kind(name, f"{method} to return None", result)


def require_kept(name: str, kept: Any, asked: Sequence[int]) -> list[int]:
    """Require the cached lengths after ``rollback`` of level `name`: no longer than asked for.

    Raises:
        TypeError: no integers.
        ValueError: another number of rows, or more tokens than asked for.
    """
    given = kept.tolist() if isinstance(kept, torch.Tensor) else kept
    whole = isinstance(given, Sequence) and all(type(one) is int for one in given)
    if not whole:
        wrong_kind(name, "rollback to return None or the lengths that are left", kept)
    if len(given) != len(asked) or any(not 0 <= n <= m for n, m in zip(given, asked, strict=True)):
        raise ValueError(
            f"{name}: expected rollback to leave at most {list(asked)} tokens, given {given}"
        )
    return list(given)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (
        one.index is None or other.index is None or one.index == other.index
    )
