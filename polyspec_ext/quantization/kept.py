"""Write and read the file of a 4-bit copy, `int4.safetensors`; reading checks every field before
anything is constructed from it.

A layer has four tensors: `values`, two to a byte, the even input in the low nibble; `scales` and
`zeros` of its groups; and a `sample` of the model's weights, to recognise the model. The file's
metadata has a CRC-32 of every tensor with its name, so that a damaged file is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import replacing
from ..ops.int4 import GROUPS
from .weights import SAMPLE, Int4Weights

FILE, FORMAT = "int4.safetensors", "polyspec-int4-4"

_GROUPS = {str(group): group for group in GROUPS}  # by text in the file's metadata
# Bytes: of the header's length field; at most, of the header's text common to all layers, and of
# its text about a tensor but for the layer's name.
_LENGTH, _HEADER, _ENTRY = 8, 128, 192
_DTYPES = {"values": "U8", "scales": "BF16", "zeros": "BF16", "sample": "F32"}


@dataclass(frozen=True)
class Kept:
    """Contents of a file.

    Attributes:
        group: inputs with a common scale and zero.
        shapes, samples: by the layer's name in the model.
    """

    group: int
    shapes: dict[str, tuple[int, int]]
    samples: dict[str, Tensor]
    _parts: dict[str, tuple[Tensor, ...]]  # values, scales and zeros as in the file

    def take(self, name: str) -> Int4Weights:
        """Remove and return the weights of a layer."""
        pairs, scales, zeros = self._parts.pop(name)
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        return Int4Weights(values, scales.float(), zeros.float())


def write(
    place: Path, weights: Iterable[tuple[str, Int4Weights]], samples: Mapping[str, Tensor]
) -> None:
    """Write the weights of the layers in `samples`, at least one, all with the same group size.
    They are taken and written layer by layer: together, a byte for each value, they would be half
    the model's size (the writer of the safetensors package needs all of them at once). The file
    appears when it is complete: other processes may write or read it meanwhile."""
    # Offsets are known after the last tensor: the header is padded with spaces.
    room = _HEADER + sum(len(_DTYPES) * (_ENTRY + len(json.dumps(name))) for name in samples)
    header: dict[str, Any] = {}
    sums: dict[str, str] = {}
    begin = group = 0
    with replacing(place) as whole, whole.open("wb") as file:
        file.seek(_LENGTH + room)
        for name, own in weights:
            group = own.group
            pairs = own.values[:, ::2] | own.values[:, 1::2] << 4
            parts = pairs, own.scales.bfloat16(), own.zeros.bfloat16(), samples[name]
            for (part, kind), tensor in zip(_DTYPES.items(), parts, strict=True):
                content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                sums[f"{name}.{part}"] = _sum(f"{name}.{part}", content)
                size = file.write(content)
                header[f"{name}.{part}"] = {
                    "dtype": kind,
                    "shape": list(tensor.shape),
                    "data_offsets": [begin, begin + size],
                }
                begin += size
        every = "".join(sums[key] for key in sorted(sums))
        header["__metadata__"] = {"format": FORMAT, "group": str(group), "crc32": every}
        file.seek(0)
        file.write(room.to_bytes(_LENGTH, "little"))
        file.write(json.dumps(header).ljust(room).encode())


def _sum(name: str, content: Any) -> str:
    return f"{zlib.crc32(content, zlib.crc32(name.encode())):08x}"


def read(place: Path) -> Kept:
    """Read a file of `write`. ValueError: the file is damaged, has other contents, or numbers that
    are not finite; names the field."""
    try:
        with safe_open(place, "pt") as file:
            return _read(file, f"folder: {place}")
    except SafetensorError as error:
        raise ValueError(f"folder: expected a safetensors file {place}: {error}") from error
    except OSError as error:
        raise OSError(f"folder: expected a readable file {place}: {error}") from error


def _read(file: Any, name: str) -> Kept:
    about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise ValueError(f"{name}: expected the format {FORMAT}, given {about.get('format')}")
    group = _GROUPS.get(str(about.get("group")))
    if group is None:
        raise ValueError(
            f"{name}: group: expected one of {', '.join(_GROUPS)}, given {about.get('group')!r:.40}"
        )
    # Only the header, so that unsuitable tensors are not read.
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
    keys, told = sorted(file.keys()), str(about.get("crc32"))
    if len(told) != 8 * len(keys):
        raise ValueError(f"{name}: crc32: expected {8 * len(keys)} digits, given {len(told)}")
    sums = {key: told[8 * i : 8 * i + 8] for i, key in enumerate(keys)}
    found = Kept(group, {}, {}, {})
    for layer, own in shapes.items():
        _require_shapes(own, group, f"{name}: {layer}")
        read = {part: file.get_tensor(f"{layer}.{part}") for part in _DTYPES}
        for part, tensor in read.items():
            key = f"{layer}.{part}"
            given_sum = _sum(key, tensor.view(torch.uint8).numpy().data)
            if given_sum != sums[key]:
                raise ValueError(
                    f"{name}: {key}: expected the CRC-32 {sums[key]}, given {given_sum}: the file "
                    "is damaged"
                )
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


def _require_finite(read: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights that are not finite: they lie between zero - 8 scale and zero + 7 scale."""
    reach = read["scales"].float() * 8
    for part, farthest in (("scales", reach), ("zeros", reach.abs() + read["zeros"].abs())):
        beyond = read[part][~torch.isfinite(farthest)]
        if beyond.numel():
            raise ValueError(
                f"{name}.{part}: expected numbers that make finite weights, given "
                f"{float(beyond[0])}"
            )
