"""4-bit copies that are made once, kept in the user's cache folder, and found again."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from typing import Any

import torch

from .. import progress
from ..files import cache_folder
from . import load_w4, quantize_w4, quantize_w8, save_w4
from .weights import quantisable

_GROUPS = (128, 64, 32)


def copy_of(word: str, model: Any, name: str = "model") -> Any:
    """Make or load the copy that a word of `levels.sources.COPIES` stands for; see `stored_w4`."""
    if word == "w4":
        return stored_w4(model, name)
    try:
        return quantize_w8(model)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def stored_w4(model: Any, name: str = "model") -> Any:
    """Make or load the 4-bit copy of a model, rounded to the nearest in groups of 128 inputs, or in
    the largest groups for which no fewer layers can be quantised.

    On the CPU it is kept in ``polyspec_ext/w4`` of the user's cache folder, by a digest of the
    model's shapes and weights; where nothing can be written it is made anew. `name` is the model's,
    for messages.
    """
    layers = {group: quantisable(model, group, head=True) for group in _GROUPS}
    group = max(_GROUPS, key=lambda each: (len(layers[each]), each))
    if not layers[group]:
        raise ValueError(
            f"{name}: expected linear layers whose inputs are a multiple of {_GROUPS[-1]}, given "
            f"{type(model).__name__} without any"
        )
    cache = cache_folder() if model.device.type == "cpu" else None
    if cache is not None:
        digest = hashlib.sha256(str(group).encode())
        for path, layer in layers[group].items():
            # All of it: a model that was trained further may differ in a few rows alone.
            weight = layer.weight.detach().cpu().contiguous()
            check = zlib.crc32(weight.view(torch.uint8).numpy().data)
            digest.update(f"{path} {tuple(weight.shape)} {weight.dtype} {check}".encode())
        folder = cache / "w4" / digest.hexdigest()[:16]
        # A file that another release wrote, or that is not whole, is made again.
        with contextlib.suppress(OSError, ValueError):
            return load_w4(model, folder)
    progress.note(f"{name}: rounding its weights to 4 bits, once")
    copy = quantize_w4(model, group)
    if cache is not None:
        with contextlib.suppress(OSError):
            save_w4(copy, folder)
    return copy
