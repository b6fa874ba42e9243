"""The dense product through torch: float64, refusals, opcheck (see csrc/tests/core)."""

import pytest
import torch

from polyspec_ext import _C
from polyspec_ext.ops.decoder import dense_pack as pack
from polyspec_ext.ops.decoder import dense_product as product

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rows_with_a_stride() -> None:
    weights, x = random(16, 100), random(4, 100, seed=1)
    packed = pack(weights[:, :64])
    assert packed.equal(pack(weights[:, :64].contiguous()))
    y = product(x[:, :64], packed, 16, None)
    assert y.equal(product(x[:, :64].contiguous(), packed, 16, None))
    assert product(x[:0, :64], packed, 16, None).shape == (0, 16)


@DTYPES
@pytest.mark.parametrize("inputs", [96, 1024, 100], ids=str)
def test_multiplies_the_weights_themselves_on_cuda(inputs, dtype, device) -> None:
    on_stand_in = hasattr(_C, "launches")
    if device.type == "cpu" and not on_stand_in:
        pytest.skip("needs CUDA or the stand-in")
    streams = on_stand_in or torch.cuda.get_device_capability(device) >= (9, 0)
    ours = streams and dtype == torch.bfloat16 and inputs % 32 == 0  # else torch's product
    weights, x = random(33, inputs, dtype=dtype), random(20, inputs, seed=1, dtype=dtype)
    for bias in (None, random(33, seed=2, dtype=dtype)):
        wanted = torch.nn.functional.linear(x.double(), weights.double())
        wanted += 0 if bias is None else bias.double()
        given = weights.to(device), 33, None if bias is None else bias.to(device)
        whole = product(x[:16].to(device), *given)
        for tokens in (1, 2, 8, 9, 16, 17):
            before = _C.launches() if on_stand_in else 0
            y = product(x[:tokens].to(device), *given)
            assert not on_stand_in or _C.launches() - before == (ours and tokens <= 16)
            assert (y.double().cpu() - wanted[:tokens]).norm() < 0.01 * wanted[:tokens].norm()
            assert not ours or tokens > 16 or y.equal(whole[:tokens])
    with pytest.raises(RuntimeError, match="packed: expected size 33 in dimension 0"):
        product(x.to(device), weights[:32].to(device), 33, None)


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
