"""The file that a 4-bit copy is kept in, `int4.safetensors`: written, and read with every field
checked before anything is made of it.

A layer has four tensors: `values`, two to a byte, the even input in the low nibble; `scales` and
`zeros` of its groups; and a `sample` of the model's own weights, which tells it from others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..levels.quantized import SAMPLE, Int4Weights
from ..ops.int4 import GROUPS

FILE, FORMAT = "int4.safetensors", "polyspec-int4-3"
_EARLIER = "polyspec-int4-2"  # files of it hold no output head

_GROUPS = {str(group): group for group in GROUPS}  # as the file's metadata has them
_DTYPES = {"values": "U8", "scales": "BF16", "zeros": "BF16", "sample": "F32"}


@dataclass(frozen=True)
class Kept:
    """What a file holds.

    Attributes:
        group: inputs with one scale and zero.
        shapes, samples: of each layer, by its name in the model.
    """

    group: int
    shapes: dict[str, tuple[int, int]]
    samples: dict[str, torch.Tensor]
    _parts: dict[str, tuple[torch.Tensor, ...]]  # as they are in the file

    def take(self, name: str) -> Int4Weights:
        """The weights of a layer, once: nobody keeps them here."""
        pairs, scales, zeros = self._parts.pop(name)
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        return Int4Weights(values, scales.float(), zeros.float())


def write(
    place: Path, weights: Mapping[str, Int4Weights], samples: Mapping[str, torch.Tensor]
) -> None:
    """Keep the weights of at least one layer, all of one group size."""
    tensors: dict[str, torch.Tensor] = {}
    for name, own in weights.items():
        pairs = own.values[:, ::2] | own.values[:, 1::2] << 4
        tensors[f"{name}.values"] = pairs.contiguous()
        tensors[f"{name}.scales"] = own.scales.bfloat16().contiguous()
        tensors[f"{name}.zeros"] = own.zeros.bfloat16().contiguous()
        tensors[f"{name}.sample"] = samples[name]
    group = next(iter(weights.values())).group
    save_file(tensors, place, {"format": FORMAT, "group": str(group)})


def read(place: Path) -> Kept:
    """What `write` kept.

    Raises:
        ValueError: the file holds something else, or numbers that are not finite; names the field.
        OSError: it cannot be read.
    """
    try:
        with safe_open(place, "pt") as file:
            return _read(file, f"folder: {place}")
    except SafetensorError as error:
        raise ValueError(f"folder: expected a safetensors file {place}: {error}") from error
    except OSError as error:
        raise OSError(f"folder: expected a readable file {place}: {error}") from error


def _read(file: Any, name: str) -> Kept:
    about = file.metadata() or {}
    if about.get("format") not in (FORMAT, _EARLIER):
        raise ValueError(
            f"{name}: expected the format {FORMAT} or {_EARLIER}, given {about.get('format')}"
        )
    group = _GROUPS.get(str(about.get("group")))
    if group is None:
        raise ValueError(
            f"{name}: group: expected one of {', '.join(_GROUPS)}, given {about.get('group')!r:.40}"
        )
    # The header alone, so that nothing is read which does not fit.
    shapes: dict[str, dict[str, list[int]]] = {}
    for key in file.keys():  # noqa: SIM118
        layer, _, part = key.rpartition(".")
        kind, given = _DTYPES.get(part), file.get_slice(key)
        if kind is None:
            raise ValueError(f"{name}: expected tensors named {', '.join(_DTYPES)}, given {key!r}")
        if given.get_dtype() != kind:
            raise ValueError(f"{name}: {key}: expected {kind}, given {given.get_dtype()}")
        shapes.setdefault(layer, {})[part] = given.get_shape()
    if not shapes:
        raise ValueError(f"{name}: expected the tensors of at least 1 layer, given none")
    found = Kept(group, {}, {}, {})
    for layer, own in shapes.items():
        _require_shapes(own, group, f"{name}: {layer}")
        read = {part: file.get_tensor(f"{layer}.{part}") for part in _DTYPES}
        _require_finite(read, f"{name}: {layer}")
        outputs, half = own["values"]
        found.shapes[layer], found.samples[layer] = (outputs, 2 * half), read.pop("sample")
        found._parts[layer] = tuple(read.values())
    return found


def _require_shapes(given: Mapping[str, list[int]], group: int, name: str) -> None:
    missing = next((part for part in _DTYPES if part not in given), None)
    if missing is not None:
        raise ValueError(f"{name}.{missing}: expected a tensor of this name, given none")
    values = given["values"]
    if len(values) != 2 or values[0] < 1 or values[1] < 1 or 2 * values[1] % group:
        raise ValueError(
            f"{name}.values: expected shape [N, K / 2] with N >= 1 and K a multiple of {group}, "
            f"given {values}"
        )
    groups = [values[0], 2 * values[1] // group]
    for part, shape in (("scales", groups), ("zeros", groups), ("sample", [SAMPLE])):
        if given[part] != shape:
            raise ValueError(f"{name}.{part}: expected shape {shape}, given {given[part]}")


def _require_finite(read: Mapping[str, torch.Tensor], name: str) -> None:
    """A weight lies between zero - 8 scale and zero + 7 scale."""
    reach = read["scales"].float() * 8
    for part, farthest in (("scales", reach), ("zeros", reach.abs() + read["zeros"].abs())):
        beyond = read[part][~torch.isfinite(farthest)]
        if beyond.numel():
            raise ValueError(
                f"{name}.{part}: expected numbers that make finite weights, given "
                f"{float(beyond[0])}"
            )
