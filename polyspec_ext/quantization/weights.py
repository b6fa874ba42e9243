"""Products with 4-bit weights on the CPU and on CUDA (polyspec/int4.hpp), linear layers and copies
of models that use them, and the file of a copy, `int4.safetensors`.

Weights are ``w[n, k] = (q[n, k] - 8) * scales[n, k // group] + zeros[n, k // group]`` with q in 0
to 15, the form of torch's ``_weight_int4pack_mm``. A wrong shape, dtype or value is a RuntimeError
that names it. Rounding and unpacking run on the CPU only.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.library import register_fake

from ..files import replacing
from ..levels.products import (
    EnteringProduct,
    LeavingProduct,
    Part,
    QuantizedLinear,
    in_huge_pages,
    is_plain,
    replaced,
    stacked_bias,
)
from ..ops import decoder
from ..ops.decoder import LABEL_BYTES, Matrix

SAMPLE = 32  # weights of a layer, to recognise its model

# ---- products ------------------------------------------------------------------------------------

_Three = tuple[Tensor, Tensor, Tensor]
_round: Callable[..., _Three] = torch.ops.polyspec.int4_round.default
GROUPS = (32, 64, 128, 256)


def round_to_nearest(
    weights: Tensor, group: int, importance: Tensor | None = None, *, float_scales: bool = False
) -> _Three:
    """Round a matrix to 4-bit numbers, each weight independently.

    Each group has the range with the least squared error among the range of all its weights and
    narrower ranges, because clipping the largest weights may cost less than coarser steps for all.

    Args:
        weights: [N, K] float32, bfloat16 or float16, finite, unit stride along K; K a multiple of
            `group`, N any.
        group: 32, 64, 128 or 256 inputs that share a scale and zero.
        importance: [K] float32 >= 0, weights of the squared errors; None: equal weights.
        float_scales: scales and zeros in float32; else they are exact in bfloat16.

    Returns:
        values [N, K] uint8, scales and zeros [N, K / group] float32, the arguments of `pack`.
    """
    return _round(weights, importance, group, float_scales)


pack: Callable[..., Tensor]
pack = partial(torch.ops.polyspec.int4_pack.default, float_scales=False)
"""Pack the matrix as `product` reads it on the device of the tensors.

Args:
    values: [N, K] uint8, q in 0 to 15 (on CUDA the lower four bits count); K a multiple of
        `group`, N any.
    scales, zeros: [N, K / group] float32.
    group: 32, 64, 128 or 256 inputs with one scale and zero.
    float_scales: keep scales and zeros in float32, on the CPU; else they are rounded to bfloat16.

Returns:
    uint8, one dimension; polyspec/int4.hpp has the layouts.
"""

unpack: Callable[..., _Three]
unpack = partial(torch.ops.polyspec.int4_unpack.default, float_scales=False)
"""Return values, scales and zeros of `pack`, by `packed`, N, K and group."""

product: Callable[..., Tensor]
product = partial(torch.ops.polyspec.int4_product.default, float_scales=False)
"""Return ``x W^T``, [M, outputs] in the dtype of `x`.

Row m is the same, bit for bit, whatever M is; polyspec/int4.hpp has the bounds. On the CPU weights
are read once for up to 64 tokens, activations are rounded to 8 bits, by token and group of inputs,
the bits do not depend on the processor and the number of threads, and where x[m] is not finite row
m is NaN. On CUDA it is one launch, or two of 33 to 64 tokens; 32 tokens read the weights once,
and nothing but y is rounded.

Args:
    x: [M, K] float32 (on the CPU), bfloat16 or float16, unit stride along K.
    packed: of `pack` on the same device, for weights [outputs, K] in groups of `group`. In a CUDA
        graph it is read before earlier kernels have ended, so none of that graph writes it.
    outputs, group: of these weights.
"""

layer_product: Callable[..., Tensor] = torch.ops.polyspec.int4_layer_product.default
"""Return a product with the operators before and after it, with the bits of each, on CUDA in
bfloat16: in the launches of `product`, and one more for a norm of more than 8 tokens.

Args:
    x, packed, outputs, group: as of `product`; contiguous with a norm.
    gated: return `ops.decoder.gated` of the product; of a multiple of 64 outputs.
    norm, epsilon: multiply the `ops.decoder.rms_norm` of x by this weight, [K]; None: x.
    residual: [M, outputs], added to the product, if it is not gated; None: nothing.
"""

rotary_product: Callable[..., Tensor] = torch.ops.polyspec.int4_rotary_product.default
"""Return `ops.decoder.rotary_append` of a product, with the bits of both, on CUDA in bfloat16: in
the launches of `layer_product`, and one more for more than 32 tokens, for norms of heads, and for
heads that are not 64, 128, 256 or 512 wide.

Args:
    x, packed, outputs, group, norm, norm_epsilon: as of `layer_product`.
    bias and all further arguments: as of `rotary_append` after x.
"""


def _numbers(like: Tensor, outputs: int, inputs: int, group: int, *_: object) -> _Three:
    form = outputs, inputs // group
    scales, zeros = (like.new_empty(form, dtype=torch.float32) for _ in range(2))
    return like.new_empty(outputs, inputs, dtype=torch.uint8), scales, zeros


def _packed(values: Tensor, _: object, __: object, group: int, float_scales: bool) -> Tensor:
    outputs, groups = values.shape[0], values.shape[1] // group
    if values.is_cuda:
        return values.new_empty(-(-outputs // 64) * 2 * groups * (128 + group * 16))
    size = 4 if float_scales else 2
    weights = -(-outputs // 16) * groups * (2 * 16 * size + group * 8)
    return values.new_empty(weights + LABEL_BYTES)


register_fake("polyspec::int4_round", lambda x, _, group, __: _numbers(x, *x.shape, group))
register_fake("polyspec::int4_pack", _packed)
register_fake("polyspec::int4_unpack", _numbers)
register_fake("polyspec::int4_product", lambda x, _, outputs, *__: x.new_empty(len(x), outputs))
register_fake(
    "polyspec::int4_layer_product",
    lambda x, _, outputs, __, gated, *___: x.new_empty(len(x), outputs >> gated),
)
register_fake(
    "polyspec::int4_rotary_product",
    lambda x, _, __, ___, ____, _____, bias, *append: decoder.rotated_into(x, bias, *append),
)

# ---- layers and copies ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Int4Weights:
    """A quantised matrix.

    Attributes:
        values: ``[N, K]`` uint8, q in 0 to 15.
        scales, zeros: ``[N, K / group]`` float32, exact in bfloat16.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def group(self) -> int:
        """Number of inputs with a common scale and zero."""
        return self.values.shape[1] // self.scales.shape[1]

    @classmethod
    def nearest(cls, weight: Tensor, group: int) -> Int4Weights:
        """Round ``weight [N, K]``, each number independently."""
        return cls(*round_to_nearest(weight.detach().cpu(), group))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.scales, self.zeros

    def to(self, device: torch.device | str) -> Int4Weights:
        """Return the matrix on a device."""
        return Int4Weights(*(tensor.to(device) for tensor in self.tensors))

    def split(self, sizes: Sequence[int]) -> list[Int4Weights]:
        """Split the matrix by rows."""
        pieces = (tensor.split(list(sizes)) for tensor in self.tensors)
        return [Int4Weights(*piece) for piece in zip(*pieces, strict=True)]


def joined(matrices: Sequence[Int4Weights]) -> Int4Weights:
    """Stack matrices by rows."""
    if len(matrices) == 1:
        return matrices[0]
    return Int4Weights(*map(torch.cat, zip(*(matrix.tensors for matrix in matrices), strict=True)))


class Int4Linear(QuantizedLinear):
    """``x W^T + b`` with 4-bit weights, in the dtype of `x`."""

    packed: Tensor

    def __init__(self, weights: Int4Weights, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", in_huge_pages(pack(*weights.tensors, self.group)))
        self.register_buffer("bias", bias)

    def weights(self) -> Int4Weights:
        """Return the unpacked weights."""
        return Int4Weights(*unpack(self.packed, self.out_features, self.in_features, self.group))

    def product(self, x: Tensor) -> Tensor:
        return product(x, self.packed, self.out_features, self.group)

    def matrices(self) -> Sequence[Matrix]:
        form = decoder.INT4, self.out_features, self.in_features
        return [Matrix(*form, self.packed, self.group)]


class CudaInt4Linear(QuantizedLinear):
    """An `Int4Linear` on CUDA, packed there. Inputs in float32 are multiplied in bfloat16."""

    packed: Tensor

    def __init__(
        self, weights: Int4Weights, bias: Tensor | None = None, device: torch.device | str = "cuda"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", pack(*weights.to(device).tensors, self.group))
        self.register_buffer("bias", bias)

    def product(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self.product(x.bfloat16()).float()
        return product(x, self.packed, self.out_features, self.group)

    def entering(self, plain: EnteringProduct, gated: bool) -> EnteringProduct:
        form = self.packed, self.out_features, self.group

        def run(
            x: Tensor, more: Tensor | None, weight: Tensor | None, epsilon: float, *append: Any
        ) -> tuple[Tensor, Tensor]:
            if more is not None or x.dtype != torch.bfloat16:
                return plain(x, more, weight, epsilon, *append)
            if append:
                return x, rotary_product(x, *form, weight, epsilon, *append)
            return x, layer_product(x, *form, gated, weight, epsilon, None)

        apart = gated and (self.bias is not None or self.out_features % 64 != 0)
        return plain if apart else run

    def leaving(self, plain: LeavingProduct) -> LeavingProduct:
        form = self.packed, self.out_features, self.group

        def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
            if x.dtype != torch.bfloat16:
                return plain(x, residual)
            return layer_product(x, *form, False, None, 0.0, residual), None

        return run if self.bias is None else plain


def quantisable(model: Any, group: int, head: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers of `model` that 4-bit weights can replace, by name: plain layers
    with a multiple of `group` inputs, with `head` including the output head. A layer at several
    paths has its first name."""
    output = None if head else model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if module is not output and is_plain(module) and module.in_features % group == 0
    }


def head_of(model: Any) -> str | None:
    """Return the name of the output head; None: it is no module of the model."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def sample_of(layer: nn.Linear) -> Tensor:
    """Return some of a layer's weights, evenly spread, ``[32]`` float32: the same, to rounding, in
    any dtype that a checkpoint is loaded in."""
    weight = layer.weight.detach().flatten()
    indices = torch.linspace(0, weight.numel() - 1, SAMPLE, dtype=torch.float64).long()
    return weight[indices.to(weight.device)].float().cpu()


def with_weights(model: Any, names: Collection[str], weights: Callable[[str], Int4Weights]) -> Any:
    """Return a copy of `model` that multiplies with 4-bit weights and shares all else with it.

    Projections of the same input are a single product. The copy's `sampled_weights` are `sample_of`
    the layers, by name.

    Args:
        names: names of the layers, as in `quantisable`.
        weights: function of a name; called once for each, and packed before the next product's
            calls, so that not all weights need be in memory.
    """
    layers = {name: model.get_submodule(name) for name in names}
    known = {id(layer): name for name, layer in layers.items()}

    def make(siblings: Sequence[nn.Linear]) -> nn.Module:
        bias, device = stacked_bias(siblings), siblings[0].weight.device
        matrices = [weights(known[id(layer)]) for layer in siblings]
        if device.type == "cuda":
            return CudaInt4Linear(joined([matrix.to(device) for matrix in matrices]), bias, device)
        return Int4Linear(joined(matrices), bias)

    twin = replaced(model, lambda module: id(module) in known, make)
    twin.sampled_weights = {name: sample_of(layer) for name, layer in layers.items()}
    return twin


def weights_of(model: Any) -> Iterator[tuple[str, Int4Weights]]:
    """Yield the 4-bit weights of a copy on the CPU, with the layers' names in its model."""
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            yield name, module.weights()
        elif isinstance(module, Part) and isinstance(module.merged.linear, Int4Linear):
            yield name, module.merged.linear.weights().split(module.merged.sizes)[module.index]


# ---- files ---------------------------------------------------------------------------------------

# A layer has four tensors: `values`, two to a byte, the even input in the low nibble; `scales` and
# `zeros` of its groups; and a `sample` of the model's weights, to recognise the model. The file's
# metadata has a CRC-32 of every tensor with its name, so that a damaged file is refused.
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


def write_weights(
    location: Path, weights: Iterable[tuple[str, Int4Weights]], samples: Mapping[str, Tensor]
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
    with replacing(location) as whole, whole.open("wb") as file:
        file.seek(_LENGTH + room)
        for name, matrix in weights:
            group = matrix.group
            pairs = matrix.values[:, ::2] | matrix.values[:, 1::2] << 4
            parts = pairs, matrix.scales.bfloat16(), matrix.zeros.bfloat16(), samples[name]
            for (field, kind), tensor in zip(_DTYPES.items(), parts, strict=True):
                content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                sums[f"{name}.{field}"] = _sum(f"{name}.{field}", content)
                size = file.write(content)
                header[f"{name}.{field}"] = {
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


def read_weights(location: Path) -> Kept:
    """Read a file of `write_weights`. ValueError: the file is damaged, has other contents, or
    numbers that are not finite; names the field."""
    try:
        with safe_open(location, "pt") as file:
            return _read(file, f"folder: {location}")
    except SafetensorError as error:
        raise ValueError(f"folder: expected a safetensors file {location}: {error}") from error
    except OSError as error:
        raise OSError(f"folder: expected a readable file {location}: {error}") from error


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
        layer, _, field = key.rpartition(".")
        kind, entry = _DTYPES.get(field), file.get_slice(key)
        if kind is None:
            raise ValueError(f"{name}: expected tensors named {', '.join(_DTYPES)}, given {key!r}")
        if entry.get_dtype() != kind:
            raise ValueError(f"{name}: {key}: expected {kind}, given {entry.get_dtype()}")
        shapes.setdefault(layer, {})[field] = entry.get_shape()
    if not shapes:
        raise ValueError(f"{name}: expected the tensors of at least 1 layer, given none")
    keys, digits = sorted(file.keys()), str(about.get("crc32"))
    if len(digits) != 8 * len(keys):
        raise ValueError(f"{name}: crc32: expected {8 * len(keys)} digits, given {len(digits)}")
    sums = {key: digits[8 * i : 8 * i + 8] for i, key in enumerate(keys)}
    stored = Kept(group, {}, {}, {})
    for layer, by_field in shapes.items():
        _require_shapes(by_field, group, f"{name}: {layer}")
        read = {field: file.get_tensor(f"{layer}.{field}") for field in _DTYPES}
        for field, tensor in read.items():
            key = f"{layer}.{field}"
            given_sum = _sum(key, tensor.view(torch.uint8).numpy().data)
            if given_sum != sums[key]:
                raise ValueError(
                    f"{name}: {key}: expected the CRC-32 {sums[key]}, given {given_sum}: the file "
                    "is damaged"
                )
        _require_finite(read, f"{name}: {layer}")
        outputs, half = by_field["values"]
        stored.shapes[layer], stored.samples[layer] = (outputs, 2 * half), read.pop("sample")
        stored._parts[layer] = tuple(read.values())
    return stored


def _require_shapes(shapes: Mapping[str, list[int]], group: int, name: str) -> None:
    missing = next((field for field in _DTYPES if field not in shapes), None)
    if missing is not None:
        raise ValueError(f"{name}.{missing}: expected a tensor of this name, given none")
    values = shapes["values"]
    if len(values) != 2 or values[0] < 1 or values[1] < 1 or 2 * values[1] % group:
        raise ValueError(
            f"{name}.values: expected shape [N, K / 2] with N >= 1 and K a multiple of {group}, "
            f"given {values}"
        )
    groups = [values[0], 2 * values[1] // group]
    for field, shape in (("scales", groups), ("zeros", groups), ("sample", [SAMPLE])):
        if shapes[field] != shape:
            raise ValueError(f"{name}.{field}: expected shape {shape}, given {shapes[field]}")


def _require_finite(read: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights that are not finite: they lie between zero - 8 scale and zero + 7 scale."""
    reach = read["scales"].float() * 8
    for field, farthest in (("scales", reach), ("zeros", reach.abs() + read["zeros"].abs())):
        beyond = read[field][~torch.isfinite(farthest)]
        if beyond.numel():
            raise ValueError(
                f"{name}.{field}: expected numbers that make finite weights, given "
                f"{float(beyond[0])}"
            )
