"""Products with the blocks of GGUF files, over torch tensors on the CPU (polyspec/blocks.hpp). A
wrong shape, dtype or type is a RuntimeError that names it.

Types have the numbers of GGUF files, as in ``gguf.GGMLQuantizationType``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .decoder import LABEL_BYTES

_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
BLOCK_INPUTS = {2: 32, 3: 32, 6: 32, 7: 32, 8: 32, 12: 256, 13: 256, 14: 256}
"""Inputs of a block, by type: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K."""

# Bytes of a packed block of 16 outputs, by type.
_PACKED = {2: 320, 3: 320, 6: 448, 7: 448, 8: 576, 12: 2368, 13: 3392, 14: 3392}

pack: Callable[[Tensor, Tensor, int, int, int, int], None] = torch.ops.polyspec.block_pack.default
"""Pack rows of a matrix as `product` reads it; no weight changes.

Args:
    packed: [packed_bytes] uint8, written; the layout is that of polyspec/blocks.hpp.
    blocks: [rows, bytes of a row] uint8, contiguous, as they are in the file. A multiple of 16
        rows, or the last rows.
    first: output of the first row, a multiple of 16.
    outputs, inputs: of the matrix; whole blocks of inputs.
    type: of `BLOCK_INPUTS`.
"""

rows: Callable[[Tensor, Tensor, int, int, int], Tensor] = torch.ops.polyspec.block_rows.default
"""Return weights of some outputs, [N, inputs] float32, as they are dequantised from the file.

Args:
    packed: of `pack`, for weights [outputs, inputs] of this type.
    rows: [N] int64, contiguous, 0 to outputs - 1.
"""

product: Callable[[Tensor, Tensor, int, int], Tensor]
product = torch.ops.polyspec.block_product.default
"""Return ``x W^T``, [M, outputs] in the dtype of `x`.

Weights are read once for up to 16 tokens. Activations are rounded to 8 bits, by token and group of
32 inputs (Q6_K: 16); polyspec/blocks.hpp has the bound. Row m is the same, bit for bit, whatever M,
the processor and the number of threads are; where x[m] is not finite it is NaN.

Args:
    x: [M, K] float32, bfloat16 or float16, unit stride along K.
    packed: of `pack`, for weights [outputs, K] of this type.
    outputs, type: of these weights.
"""


def packed_bytes(outputs: int, inputs: int, type: int) -> int:
    """Return the size of a packed matrix."""
    return -(-outputs // 16) * (inputs // BLOCK_INPUTS[type]) * _PACKED[type] + LABEL_BYTES


@_fake("polyspec::block_pack")
def _(*_: object) -> None:
    pass


@_fake("polyspec::block_rows")
def _(packed: Tensor, rows: Tensor, outputs: int, inputs: int, type: int) -> Tensor:
    return packed.new_empty(rows.shape[0], inputs, dtype=torch.float32)


@_fake("polyspec::block_product")
def _(x: Tensor, packed: object, outputs: int, type: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)
