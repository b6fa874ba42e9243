"""4-bit copies of models, as levels below them: `quantize_w4`, kept by `save_w4` and `load_w4`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import arguments, progress
from ..levels.quantized import (
    Int4Weights,
    quantisable,
    sample_of,
    samples_of,
    weights_of,
    with_weights,
)
from ..ops.int4 import GROUPS
from . import rules
from .calibration import Hessians, token_ids

__all__ = ["load_w4", "quantize_w4", "save_w4"]

FILE, FORMAT = "int4.safetensors", "polyspec-int4-2"
# Between a weight in one dtype and in another.
_ROUNDING, _TINY = 2**-8, 2**-24  # relative, absolute


@torch.inference_mode()
def quantize_w4(model: Any, group_size: int = 128, calibration: Sequence[Any] | None = None) -> Any:
    """A copy of a causal language model whose linear layers have 4-bit weights.

    It shares embeddings, norms and head with `model` and reads a quarter of the bytes of bfloat16
    (``Level(copy, shares_cache_with=model)`` shares the cache as well). On the CPU it multiplies
    with `ops.int4.product`, on CUDA with torch's packed operator.

    Args:
        model: a Hugging Face model in eval mode; it is not touched.
        group_size: 32, 64, 128 or 256 inputs with one scale and zero. Layers whose inputs are no
            multiple of it stay as they are.
        calibration: texts or lists of token ids, a hundred or so of the kind that will be decoded:
            errors are pushed into the weights that are correlated with them on these (GPTQ). None:
            every weight is rounded to the nearest, which takes a fraction of the time and loses
            more.

    Returns:
        The copy, on the device of `model`.

    Raises:
        TypeError, ValueError: an argument is none of these, or nothing can be quantised; the
            message names the argument.
    """
    _require_group(group_size)
    layers = quantisable(model, group_size)
    if not layers:
        raise ValueError(
            f"model: expected linear layers whose inputs are a multiple of {group_size}, given "
            f"{type(model).__name__} without any"
        )
    hessians: Hessians | None = None
    if calibration is not None:
        hessians = Hessians(layers)
        hessians.read(model, token_ids(model, calibration))
    made: dict[str, Int4Weights] = {}
    for name in progress.bar(layers, desc="quantisation", leave=False):
        weight = layers[name].weight.detach()
        if hessians is None:
            found = rules.round_to_nearest(weight, group_size)
        else:
            found = rules.with_feedback(weight, hessians.of(name), group_size)
        made[name] = Int4Weights(found.values.cpu(), found.scales.cpu(), found.zeros.cpu())
    return with_weights(model, made)


def save_w4(copy: Any, folder: str | Path) -> None:
    """Keep the 4-bit weights of a copy of `quantize_w4` on the CPU in a directory
    (`int4.safetensors`), for `load_w4`. What the copy shares with its model is not written.

    Two values lie in a byte, the even input in the low nibble; scales and zeros are bfloat16. A few
    of the model's own weights are written beside them, by which `load_w4` knows it.

    Args:
        copy: of `quantize_w4`.
        folder: made where it is not there.

    Raises:
        ValueError: the model has no such weights.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    group = 0
    for name, weights in weights_of(copy):
        group = weights.group
        pairs = weights.values[:, ::2] | weights.values[:, 1::2] << 4
        tensors[f"{name}.values"] = pairs.contiguous()
        tensors[f"{name}.scales"] = weights.scales.bfloat16().contiguous()
        tensors[f"{name}.zeros"] = weights.zeros.bfloat16().contiguous()
        tensors[f"{name}.sample"] = samples_of(copy)[name]
    if not tensors:
        raise ValueError(
            f"copy: expected a copy of quantize_w4 on the CPU, given {type(copy).__name__} without "
            "4-bit weights"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / FILE, {"format": FORMAT, "group": str(group)})


def load_w4(model: Any, folder: str | Path) -> Any:
    """The copy that `save_w4` kept, over the model that it was made of.

    Args:
        model: as `quantize_w4` was given it.
        folder: as `save_w4` was given it.

    Returns:
        The copy, as `quantize_w4` returned it.

    Raises:
        FileNotFoundError: nothing was kept there.
        ValueError: the file is none, or of a model of other layers or weights.
    """
    from safetensors import SafetensorError, safe_open

    place = Path(folder) / FILE
    if not place.is_file():
        raise FileNotFoundError(f"folder: expected {FILE} in {Path(folder)}, which has none")
    made: dict[str, Int4Weights] = {}
    try:
        with safe_open(place, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError(
                    f"folder: expected {place} in the format {FORMAT}, given {about.get('format')}"
                )
            group = _require_group(int(about["group"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"folder: expected a safetensors file {place}: {error}") from error
    layers = quantisable(model, group)
    names = {name.rsplit(".", 1)[0] for name in tensors}
    if names != set(layers):
        other = min(names ^ set(layers))
        raise ValueError(
            f"model: expected the layers that {place} was made of, which {other} tells apart"
        )
    for name, layer in layers.items():
        pairs = tensors[f"{name}.values"]
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        if values.shape != layer.weight.shape:
            raise ValueError(
                f"model: expected {name} of {tuple(values.shape)}, as in {place}, given "
                f"{tuple(layer.weight.shape)}"
            )
        made[name] = Int4Weights(
            values, tensors[f"{name}.scales"].float(), tensors[f"{name}.zeros"].float()
        )
    for name, layer in layers.items():
        if not torch.allclose(tensors[f"{name}.sample"], sample_of(layer), _ROUNDING, _TINY):
            raise ValueError(
                f"model: expected the one that {place} was made of, given one with other weights "
                f"in {name}"
            )
    return with_weights(model, made)


def _require_group(group: int) -> int:
    if arguments.integer("group_size", group) not in GROUPS:
        raise ValueError(f"group_size: expected 32, 64, 128 or 256, given {group}")
    return group
