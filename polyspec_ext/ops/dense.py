"""Products with packed float32 or bfloat16 weights, over torch tensors on the CPU
(polyspec/dense.hpp). A wrong shape or dtype is a RuntimeError that names the argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
LABEL_BYTES = 64  # header of packed weights with their layout (polyspec/types.hpp, PackedLayout)

pack: Callable[[Tensor], Tensor] = torch.ops.polyspec.dense_pack.default
"""Pack weights [N, K], float32 or bfloat16, unit stride along K, as `product` reads them: uint8,
one dimension, in the layout of polyspec/dense.hpp."""

product: Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
product = torch.ops.polyspec.dense_product.default
"""Return ``x W^T + b``, [M, outputs] in the dtype of `x`.

Sums are float32, in the order that polyspec/dense.hpp states, and numbers below 2^-126 count as
zero. Row m is the same, bit for bit, whatever M and the number of threads are, and on every
processor but for bfloat16 where there is AMX.

Args:
    x: [M, K] in the dtype of the weights, unit stride along K.
    packed: of `pack`, for weights [outputs, K].
    outputs: of these weights.
    bias: [outputs] in that dtype; None: none.
"""


@_fake("polyspec::dense_pack")
def _(weights: Tensor) -> Tensor:
    outputs, inputs = weights.shape
    together = 4 // weights.element_size()
    tiles = -(-outputs // 16) * -(-inputs // together) * 64
    return weights.new_empty(tiles + LABEL_BYTES, dtype=torch.uint8)


@_fake("polyspec::dense_product")
def _(x: Tensor, packed: object, outputs: int, bias: object) -> Tensor:
    return x.new_empty(x.shape[0], outputs)
