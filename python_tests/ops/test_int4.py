"""The 4-bit product through torch's dispatcher: against the dequantised product and torch's own
operator, rows that do not depend on their number, refusals, opcheck."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from polyspec_ext.ops import int4


def matrix(
    outputs: int, inputs: int, group: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=random)
    form = (outputs, inputs // group)
    scales = (torch.rand(form, generator=random) * 0.02 + 0.001).bfloat16().float()
    zeros = (torch.randn(form, generator=random) * 0.01).bfloat16().float()
    return values, scales, zeros


def dequantised(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int
) -> torch.Tensor:
    parts = (values.double() - 8).unflatten(1, (-1, group))
    return (parts * scales[..., None] + zeros[..., None]).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", int4.GROUPS)
def test_is_the_dequantised_product(group: int, dtype: torch.dtype) -> None:
    for outputs, float_scales in ((16, True), (37, False), (300, False)):
        inputs = 3 * group
        values, scales, zeros = matrix(outputs, inputs, group, seed=outputs)
        packed = int4.pack(values, scales, zeros, group, float_scales=float_scales)
        x = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        weights = dequantised(values, scales, zeros, group)
        wanted = x.double() @ weights.T
        size = (
            x.double().abs()
            @ (
                (values.double() - 8).abs() * scales.repeat_interleave(group, 1)
                + zeros.abs().repeat_interleave(group, 1)
            ).T
        )
        rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        bound = (2**-8 + (inputs + group) * 2**-23) * size + rounding * wanted.abs() + 1e-7
        alone = torch.cat(
            [
                int4.product(row[None], packed, outputs, group, float_scales=float_scales)
                for row in x
            ]
        )
        for tokens in (*range(1, 18), 33, 40):
            y = int4.product(x[:tokens], packed, outputs, group, float_scales=float_scales)
            assert y.dtype == dtype
            assert ((y.double() - wanted[:tokens]).abs() <= bound[:tokens]).all()
            assert y.equal(alone[:tokens])  # a row is what it is alone


def test_is_torchs_own_product() -> None:
    """The same weights in the form of torch's operator, where this build of torch has it."""
    group, outputs, inputs = 64, 48, 256
    values, scales, zeros = matrix(outputs, inputs, group)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    try:
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
        both = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
        wanted = torch.ops.aten._weight_int4pack_mm_for_cpu(x, theirs, group, both)
    except (NotImplementedError, AttributeError) as error:
        pytest.skip(str(error))
    y = int4.product(x, int4.pack(values, scales, zeros, group), outputs, group)
    torch.testing.assert_close(y.float(), wanted.float(), rtol=0.02, atol=0.02)


def test_unpack_is_the_way_back() -> None:
    given = matrix(37, 256, 32)
    for float_scales in (False, True):
        packed = int4.pack(*given, 32, float_scales=float_scales)
        found = int4.unpack(packed, 37, 256, 32, float_scales=float_scales)
        for got, wanted in zip(found, given, strict=True):
            assert got.equal(wanted)


def test_rows_with_a_stride() -> None:
    values, scales, zeros = matrix(16, 64, 64)
    packed = int4.pack(values, scales, zeros, 64)
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert int4.product(wide[:, :64], packed, 16, 64).equal(
        int4.product(wide[:, :64].contiguous(), packed, 16, 64)
    )
    assert int4.product(wide[:0, :64], packed, 16, 64).shape == (0, 16)


def test_refusals_name_the_argument() -> None:
    values, scales, zeros = matrix(16, 64, 64)
    packed = int4.pack(values, scales, zeros, 64)
    x = torch.randn(2, 64)
    for call, message in (
        (lambda: int4.pack(values, scales, zeros, 48), "group: expected 32, 64, 128 or 256"),
        (lambda: int4.pack(values, scales, zeros, 128), "inputs: expected a multiple of group"),
        (lambda: int4.pack(values + 16, scales, zeros, 64), "values must be in"),
        (lambda: int4.pack(values.int(), scales, zeros, 64), "values: expected"),
        (lambda: int4.pack(values, scales[:3], zeros, 64), "scales: expected size 16"),
        (lambda: int4.pack(values, scales, zeros.double(), 64), "zeros: expected"),
        (lambda: int4.product(x, packed, 32, 64), "packed: expected size"),
        (lambda: int4.product(x.double(), packed, 16, 64), "x: expected float32"),
        (lambda: int4.product(x.T, packed, 16, 64), "x: expected unit stride"),
        (lambda: int4.product(x[0], packed, 16, 64), "x: expected 2 dimensions"),
        (lambda: int4.product(x[:, :60], packed, 16, 64), "inputs: expected a multiple"),
        (lambda: int4.product(x, packed[:-1], 16, 64), "packed: expected size"),
        (lambda: int4.product(x, packed.float(), 16, 64), "packed: expected a contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_opcheck() -> None:
    values, scales, zeros = matrix(20, 64, 32)
    packed = int4.pack(values, scales, zeros, 32)
    operators = torch.ops.polyspec
    torch.library.opcheck(operators.int4_pack, (values, scales, zeros, 32, True))
    torch.library.opcheck(operators.int4_unpack, (packed, 20, 64, 32, False))
    torch.library.opcheck(operators.int4_product, (torch.randn(3, 64), packed, 20, 32, False))


EVERY_ISA = """
import sys, torch
from polyspec_ext.ops import int4
random = torch.Generator().manual_seed(3)
values = torch.randint(0, 16, (70, 256), dtype=torch.uint8, generator=random)
scales, zeros = torch.rand(70, 4, generator=random), torch.randn(70, 4, generator=random)
x = torch.randn(9, 256, generator=random).bfloat16()
packed = int4.pack(values, scales, zeros, 64)
torch.set_printoptions(precision=9)
print(int4.product(x, packed, 70, 64).float().sum().item())
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_instruction_sets_agree(isa: str) -> None:
    """To rounding: their sums run in other orders."""
    found = []
    for wanted in (isa, ""):
        environment = {k: v for k, v in os.environ.items() if k != "POLYSPEC_CPU_ISA"}
        if wanted:
            environment["POLYSPEC_CPU_ISA"] = wanted
        done = subprocess.run(
            [sys.executable, "-c", EVERY_ISA], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append(float(done.stdout))
    assert found[0] == pytest.approx(found[1], rel=2e-2, abs=2.0)
