"""How a chain and its levels are shown to people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .base import device_of


def level_line(level: Any) -> str:
    """Size, data type and place of a level's model, as in ``1.3M parameters, float32, cpu``, and
    how it runs; the class of a level that has no model of torch's."""
    model: Any = getattr(level, "model", None)
    if not isinstance(model, torch.nn.Module):
        return f"{type(level).__name__}, vocabulary of {level.vocab_size}, {device_of(level)}"
    weights = list(model.parameters())  # a tied one once
    devices = _distinct(weight.device for weight in weights) or str(device_of(level))
    kinds = _distinct(weight.dtype for weight in weights if weight.dtype.is_floating_point)
    plain = sum(weight.numel() for weight in weights if weight.dtype.is_floating_point)
    count = _rounded(plain + sum(_quantised(model)))
    how = ["packed"] if getattr(level, "pack", False) is True else []
    varies, choice = getattr(level, "varies", None), getattr(level, "choice", None)
    if varies is not None:
        how.append("block-invariant" + (f" but for {' and '.join(varies)}" if varies else ""))
    if choice is not None:
        how.append(f"chosen {choice}")
    return ", ".join(part for part in (f"{count} parameters", kinds, devices, *how) if part)


def num_parameters(level: Any) -> int | None:
    """Of a level's model; None where that cannot be told: no model of torch's, or quantised
    layers."""
    model: Any = getattr(level, "model", None)
    if not isinstance(model, torch.nn.Module) or has_quantised_layers(model):
        return None
    return sum(weight.numel() for weight in model.parameters())


def has_quantised_layers(model: torch.nn.Module) -> bool:
    """Whether a linear layer has no plain weights, whoever has quantised it."""
    return any(True for _ in _quantised(model))


def is_sharded(thing: Any) -> bool:
    """Whether other processes hold parts of the weights of a model, or of a level's
    (`torch.distributed.tensor.DTensor`)."""
    model = thing if isinstance(thing, torch.nn.Module) else getattr(thing, "model", None)
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return any(getattr(weight, "device_mesh", None) is not None for weight in weights)


def _quantised(model: torch.nn.Module) -> Iterator[int]:
    """Weights of each linear layer that has no plain ones."""
    for module in model.modules():
        inputs, outputs = (getattr(module, f"{end}_features", None) for end in ("in", "out"))
        if isinstance(inputs, int) and isinstance(outputs, int):
            weight = getattr(module, "weight", None)
            count = inputs * outputs
            if (
                not isinstance(weight, torch.Tensor)
                or not weight.is_floating_point()
                or weight.numel() != count
            ):
                yield count


def _rounded(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _distinct(things: Any) -> str:
    return " and ".join(sorted({str(thing).removeprefix("torch.") for thing in things}))
