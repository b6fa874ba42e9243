"""The bfloat16 product through torch's dispatcher: against the product in float64, the same bytes
whatever the number of rows, the threads and the instruction set, refusals, opcheck."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyspec_ext.ops import bfloat16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (37, 255), (300, 1), (1, 130)])
def test_is_the_product(outputs: int, inputs: int) -> None:
    weights, x, bias = random(outputs, inputs), random(200, inputs, seed=1), random(outputs, seed=2)
    packed = bfloat16.pack(weights)
    wanted = x.double() @ weights.double().T
    # Of a chain of float32 sums (Higham, Accuracy and Stability, 3.1), then of the result.
    sizes = x.double().abs() @ weights.double().abs().T + bias.double().abs()
    bound = (inputs + 1) * 2**-24 * sizes + 2**-8 * (wanted.abs() + bias.double().abs()) + 1e-30
    plain, biased = (bfloat16.product(x, packed, outputs, b) for b in (None, bias))
    assert plain.dtype == torch.bfloat16
    assert ((plain.double() - wanted).abs() <= bound).all()
    assert ((biased.double() - wanted - bias.double()).abs() <= bound).all()


def test_a_row_is_what_it_is_alone() -> None:
    packed = bfloat16.pack(random(90, 333))
    x = random(300, 333, seed=1)
    alone = torch.cat([bfloat16.product(row[None], packed, 90) for row in x])
    for tokens in (*range(1, 40), 127, 128, 129, 300):
        assert bfloat16.product(x[:tokens], packed, 90).equal(alone[:tokens])


def test_rows_with_a_stride() -> None:
    weights, x = random(16, 100), random(4, 100, seed=1)
    packed = bfloat16.pack(weights[:, :64])
    assert packed.equal(bfloat16.pack(weights[:, :64].contiguous()))
    y = bfloat16.product(x[:, :64], packed, 16)
    assert y.equal(bfloat16.product(x[:, :64].contiguous(), packed, 16))
    assert bfloat16.product(x[:0, :64], packed, 16).shape == (0, 16)


def test_refusals_name_the_argument() -> None:
    weights, x = random(16, 64), random(2, 64)
    packed = bfloat16.pack(weights)
    for call, message in (
        (lambda: bfloat16.pack(weights.float()), "weights: expected bfloat16"),
        (lambda: bfloat16.pack(weights[0]), "weights: expected 2 dimensions, got 1"),
        (lambda: bfloat16.pack(weights.T), "weights: expected unit stride"),
        (lambda: bfloat16.pack(weights[:0]), "outputs: expected >= 1, got 0"),
        (lambda: bfloat16.pack(weights[:, :0]), "inputs: expected >= 1, got 0"),
        (lambda: bfloat16.product(x.float(), packed, 16), "x: expected bfloat16"),
        (lambda: bfloat16.product(x.T, packed, 16), "x: expected unit stride"),
        (lambda: bfloat16.product(x, packed, 32), "packed: expected size"),
        (lambda: bfloat16.product(x[:, :60], packed, 16), "packed: expected size"),
        (lambda: bfloat16.product(x, packed.float(), 16), "packed: expected a contiguous"),
        (lambda: bfloat16.product(x, packed, 16, random(8)), "bias: expected size 16"),
        (lambda: bfloat16.product(x, packed, 16, random(16).float()), "bias: expected bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_opcheck() -> None:
    weights = random(20, 65)
    packed, operators = bfloat16.pack(weights), torch.ops.polyspec
    torch.library.opcheck(operators.bfloat16_pack, (weights,))
    for bias in (None, random(20)):
        torch.library.opcheck(operators.bfloat16_product, (random(3, 65), packed, 20, bias))


def fingerprint() -> str:
    """Of products of many shapes and numbers of rows, bit for bit."""
    digest = hashlib.sha256(b"")
    for outputs, inputs, tokens in ((70, 255, 9), (300, 512, 16), (1, 1, 1), (520, 384, 150)):
        x, packed = random(tokens, inputs, seed=1), bfloat16.pack(random(outputs, inputs))
        x[: tokens // 2] *= 2.0**-128
        x[tokens // 2, 0] = torch.nan
        y = bfloat16.product(x, packed, outputs, random(outputs, seed=2))
        digest.update(y.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512bf16"])
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(isa: str) -> None:
    package = str(Path(bfloat16.__file__).parents[2])
    code = "import torch, test_bfloat16 as t; torch.set_num_threads(3); print(t.fingerprint())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=os.environ | {"POLYSPEC_CPU_ISA": isa, "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == fingerprint()
