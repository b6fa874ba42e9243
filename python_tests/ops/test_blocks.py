"""Products and rows of GGUF blocks through torch: bound, invariance, bits, refusals, opcheck."""

from typing import Any

import numpy as np
import pytest
import torch

from polyspec_ext.levels.gguf import block_product, block_rows, pack_blocks, packed_bytes

gguf = pytest.importorskip("gguf")
from gguf_blocks import TYPES, random_blocks  # noqa: E402


def pack(raw: Any, inputs: int, kind: int) -> torch.Tensor:
    packed = torch.empty(packed_bytes(len(raw), inputs, kind), dtype=torch.uint8)
    pack_blocks(packed, torch.from_numpy(raw), 0, len(raw), inputs, kind)
    return packed


def packed_of(name: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A matrix as it is multiplied, its weights in float64, and the number of its type."""
    raw, kind = random_blocks(name, outputs, inputs), gguf.GGMLQuantizationType[name]
    weights = torch.from_numpy(gguf.dequantize(raw, kind)).double()
    return pack(raw, inputs, int(kind)), weights, int(kind)


@pytest.mark.parametrize("name", TYPES)
def test_rows_have_the_bits_of_another_reader(name: str) -> None:
    """Any bytes, with scales and minima of any finite float16: subnormal, negative, 0."""
    kind = gguf.GGMLQuantizationType[name]
    each, width = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (37, 512 // each, width), dtype=np.uint8)
    begin, count = (208, 1) if name == "Q6_K" else (0, 2)
    halves = random.integers(0, 0x7C00, (37, 512 // each, count), dtype=np.uint16)
    halves |= random.integers(0, 2, halves.shape, dtype=np.uint16) << 15
    halves[0], halves[1] = 0, halves[1] % 64
    raw[..., begin : begin + 2 * count] = halves.view(np.uint8)
    raw = raw.reshape(37, -1)
    wanted = torch.from_numpy(gguf.dequantize(raw, kind)).view(torch.int32)
    packed, ids = pack(raw, 512, int(kind)), torch.randint(37, (90,))
    found = block_rows(packed, ids, 37, 512, int(kind)).view(torch.int32)
    assert found.equal(wanted[ids])


def test_refusals() -> None:
    packed, _, kind = packed_of("Q4_K", 16, 512)
    with pytest.raises(RuntimeError, match="x: expected float32, bfloat16 or float16"):
        block_product(torch.randn(1, 512).double(), packed, 16, kind)
    with pytest.raises(RuntimeError, match="type: expected the number of a GGUF type"):
        block_product(torch.randn(1, 512), packed, 16, 10)
    with pytest.raises(RuntimeError, match="inputs in whole blocks"):
        pack_blocks(packed, torch.zeros(16, 288, dtype=torch.uint8), 0, 16, 500, kind)
    with pytest.raises(RuntimeError, match="blocks: expected size 288"):
        pack_blocks(packed, torch.zeros(16, 200, dtype=torch.uint8), 0, 16, 512, kind)
    with pytest.raises(RuntimeError, match="first: expected an output"):
        pack_blocks(packed, torch.zeros(16, 288, dtype=torch.uint8), 16, 16, 512, kind)
    for id in (-1, 16):
        with pytest.raises(RuntimeError, match=rf"rows: expected 0 to 15, given {id} at 1"):
            block_rows(packed, torch.tensor([3, id]), 16, 512, kind)
    with pytest.raises(RuntimeError, match="packed: expected size"):
        block_product(torch.randn(1, 512), packed, 48, kind)
    other, _, same_size = packed_of("Q5_K", 16, 512)
    with pytest.raises(RuntimeError, match="packed: expected layout 6"):
        block_product(torch.randn(1, 512), other, 16, int(gguf.GGMLQuantizationType.Q6_K))
    assert same_size != kind


def test_opcheck() -> None:
    for name in TYPES:
        packed, _, kind = packed_of(name, 33, 512)
        raw = torch.from_numpy(random_blocks(name, 33, 512))
        form = 33, 512, kind
        torch.library.opcheck(torch.ops.polyspec.block_pack.default, (packed, raw, 0, *form))
        torch.library.opcheck(
            torch.ops.polyspec.block_rows.default, (packed, torch.arange(5), *form)
        )
        given = (torch.randn(3, 512), packed, 33, kind)
        torch.library.opcheck(torch.ops.polyspec.block_product.default, given)
