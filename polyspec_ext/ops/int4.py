"""Products with 4-bit weights as functions over torch tensors (polyspec/int4.hpp). CUDA packs and
multiplies weights; rounding and unpacking run on the CPU only.

Weights are ``w[n, k] = (q[n, k] - 8) * scales[n, k // group] + zeros[n, k // group]`` with q in 0
to 15, the form of torch's ``_weight_int4pack_mm``. A wrong shape, dtype or value is a RuntimeError
that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .dense import LABEL_BYTES

_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
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
m is NaN. On CUDA it is one launch; blocks of 64 tokens read the weights at the same time, and
nothing but y is rounded.

Args:
    x: [M, K] float32 (on the CPU), bfloat16 or float16, unit stride along K.
    packed: of `pack` on the same device, for weights [outputs, K] in groups of `group`.
    outputs, group: of these weights.
"""


def _numbers(like: Tensor, outputs: int, inputs: int, group: int) -> _Three:
    form = outputs, inputs // group
    scales, zeros = (like.new_empty(form, dtype=torch.float32) for _ in range(2))
    return like.new_empty(outputs, inputs, dtype=torch.uint8), scales, zeros


@_fake("polyspec::int4_round")
def _(weights: Tensor, importance: object, group: int, *_: object) -> _Three:
    outputs, inputs = weights.shape
    return _numbers(weights, outputs, inputs, group)


@_fake("polyspec::int4_pack")
def _(values: Tensor, scales: object, zeros: object, group: int, float_scales: bool) -> Tensor:
    outputs, groups = values.shape[0], values.shape[1] // group
    if values.is_cuda:
        return values.new_empty(-(-outputs // 64) * 2 * groups * (128 + group * 16))
    size = 4 if float_scales else 2
    weights = -(-outputs // 16) * groups * (2 * 16 * size + group * 8)
    return values.new_empty(weights + LABEL_BYTES)


@_fake("polyspec::int4_unpack")
def _(packed: Tensor, outputs: int, inputs: int, group: int, *_: object) -> _Three:
    return _numbers(packed, outputs, inputs, group)


@_fake("polyspec::int4_product")
def _(x: Tensor, packed: object, outputs: int, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], outputs)
