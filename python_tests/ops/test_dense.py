"""The dense product through torch: float64, refusals, opcheck (see csrc/tests/core)."""

from __future__ import annotations

import pytest
import torch

from polyspec_ext.ops.decoder import dense_pack as pack
from polyspec_ext.ops.decoder import dense_product as product

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (37, 255), (300, 1), (1, 130)])
def test_is_the_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weights, x, bias = (
        random(*shape, seed=i, dtype=dtype)
        for i, shape in enumerate(((outputs, inputs), (200, inputs), (outputs,)))
    )
    packed = pack(weights)
    wanted = x.double() @ weights.double().T
    # Of a chain of float32 sums (Higham, Accuracy and Stability, 3.1), then of the result.
    sizes = x.double().abs() @ weights.double().abs().T + bias.double().abs()
    bound = (inputs + 1) * 2**-24 * sizes + 1e-30
    if dtype == torch.bfloat16:
        bound = bound + 2**-8 * (wanted.abs() + bias.double().abs())
    plain, biased = (product(x, packed, outputs, b) for b in (None, bias))
    assert plain.dtype == dtype
    assert ((plain.double() - wanted).abs() <= bound).all()
    assert ((biased.double() - wanted - bias.double()).abs() <= bound).all()


def test_rows_with_a_stride() -> None:
    weights, x = random(16, 100), random(4, 100, seed=1)
    packed = pack(weights[:, :64])
    assert packed.equal(pack(weights[:, :64].contiguous()))
    y = product(x[:, :64], packed, 16, None)
    assert y.equal(product(x[:, :64].contiguous(), packed, 16, None))
    assert product(x[:0, :64], packed, 16, None).shape == (0, 16)


def test_refusals_name_the_argument() -> None:
    weights, x = random(16, 64), random(2, 64)
    packed = pack(weights)
    for call, message in (
        (lambda: pack(weights.half()), "weights: expected float32 or bfloat16"),
        (lambda: pack(weights[0]), "weights: expected 2 dimensions, got 1"),
        (lambda: pack(weights.T), "weights: expected unit stride"),
        (lambda: pack(weights[:0]), "outputs: expected >= 1, got 0"),
        (lambda: pack(weights[:, :0]), "inputs: expected >= 1, got 0"),
        (lambda: product(x.float(), packed, 16, None), "packed: expected size"),
        (lambda: product(x.half(), packed, 16, None), "x: expected float32 or bfloat16"),
        (lambda: product(x.T, packed, 16, None), "x: expected unit stride"),
        (lambda: product(x, packed, 32, None), "packed: expected size"),
        (lambda: product(x[:, :60], packed, 16, None), "packed: expected size"),
        (lambda: product(x, packed.float(), 16, None), "packed: expected a contiguous"),
        (lambda: product(x, packed, 16, random(8)), "bias: expected size 16"),
        (lambda: product(x, packed, 16, random(16).float()), "bias: expected the dtype of x"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


@DTYPES
def test_opcheck(dtype: torch.dtype) -> None:
    weights, x = random(20, 65, dtype=dtype), random(3, 65, dtype=dtype)
    packed, operators = pack(weights), torch.ops.polyspec
    torch.library.opcheck(operators.dense_pack, (weights,))
    for bias in (None, random(20, dtype=dtype)):
        torch.library.opcheck(operators.dense_product, (x, packed, 20, bias))
