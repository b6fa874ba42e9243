"""Products with packed float32 or bfloat16 weights as functions over torch tensors on the CPU
(polyspec/dense.hpp)."""

from __future__ import annotations

import torch

__all__ = ["LABEL_BYTES", "pack", "product"]

LABEL_BYTES = 64  # in front of packed weights: what they are (polyspec/types.hpp, PackedLayout)


def pack(weights: torch.Tensor) -> torch.Tensor:
    """Pack the matrix as `product` reads it.

    Args:
        weights: [N, K] float32 or bfloat16, unit stride along K.

    Returns:
        uint8, one dimension; the layout is that of polyspec/dense.hpp.

    Raises:
        RuntimeError: a shape or dtype is none of these; the message names it.
    """
    packed: torch.Tensor = torch.ops.polyspec.dense_pack(weights)
    return packed


def product(
    x: torch.Tensor, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x W^T + b``, [M, outputs] in the dtype of `x`.

    Sums are float32, in the order that polyspec/dense.hpp states, and numbers below 2^-126 count
    as zero. Row m is the same, bit for bit, whatever M and the number of threads are, and on every
    processor but for bfloat16 where there is AMX.

    Args:
        x: [M, K] in the dtype of the weights, unit stride along K.
        packed: of `pack`, for weights [outputs, K].
        bias: [outputs] in that dtype.

    Raises:
        RuntimeError: a shape or dtype does not fit; the message names the argument.
    """
    made: torch.Tensor = torch.ops.polyspec.dense_product(x, packed, outputs, bias)
    return made


def _pack_fake(weights: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weights.shape
    together = 4 // weights.element_size()
    tiles = -(-outputs // 16) * -(-inputs // together) * 64
    return weights.new_empty(tiles + LABEL_BYTES, dtype=torch.uint8)


def _product_fake(x: torch.Tensor, packed: object, outputs: int, bias: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], outputs)


torch.library.register_fake("polyspec::dense_pack", _pack_fake)
torch.library.register_fake("polyspec::dense_product", _product_fake)
