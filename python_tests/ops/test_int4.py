"""The 4-bit product through torch: dequantised products, invariance, refusals, opcheck."""

import fake_cuda
import pytest
import torch

from polyspec_ext import _C
from polyspec_ext.ops import decoder
from polyspec_ext.quantization import weights as int4


def matrix(outputs, inputs, group, seed=0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=random)
    form = (outputs, inputs // group)
    scales = (torch.rand(form, generator=random) * 0.02 + 0.001).bfloat16().float()
    zeros = (torch.randn(form, generator=random) * 0.01).bfloat16().float()
    return values, scales, zeros


def dequantised(values, scales, zeros, group) -> torch.Tensor:
    parts = (values.double() - 8).unflatten(1, (-1, group))
    return (parts * scales[..., None] + zeros[..., None]).flatten(1)


@pytest.mark.parametrize("float_scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_to_the_nearest(dtype: torch.dtype, float_scales: bool) -> None:
    """Weights are off by half a step at most, and no range tried has a smaller error."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(21, 192, generator=random).to(dtype)[:, :128]  # rows with a stride
    importance = torch.rand(128, generator=random)
    for weigh in (None, importance):
        values, scales, zeros = int4.round_to_nearest(weights, 64, weigh, float_scales=float_scales)
        assert int(values.max()) <= 15
        if not float_scales:
            assert all(x.equal(x.bfloat16().float()) for x in (scales, zeros))
        groups = weights.double().unflatten(1, (-1, 64))
        scale, zero = scales.double()[..., None], zeros.double()[..., None]
        found = dequantised(values, scales, zeros, 64).unflatten(1, (-1, 64))
        inside = (groups >= zero - 8.5 * scale) & (groups <= zero + 7.5 * scale)
        assert inside.float().mean() > 0.9
        off = (found - groups).abs()
        assert (off[inside] <= (0.5001 * scale).expand_as(off)[inside]).all()
        each = 1 if weigh is None else weigh.view(2, 64)
        error = ((found - groups).square() * each).sum(-1)
        low, high = groups.amin(-1), groups.amax(-1)
        for share in (1.0, 0.85, 0.7):
            step = (high - low) * share / 15
            middle = (high + low + step) / 2
            if not float_scales:
                step = step.bfloat16().double()
                middle = ((high + low) / 2 + step / 2).bfloat16().double()
            q = ((groups - middle[..., None]) / step[..., None]).round().clamp(-8, 7)
            other = q * step[..., None] + middle[..., None] - groups
            assert (error <= 1.001 * (other.square() * each).sum(-1)).all()


def bytes_on_cuda(outputs: int, inputs: int, group: int) -> int:
    """Tiles of 32 outputs, an even number: a vector for each four, and half a byte a weight."""
    return -(-outputs // 64) * 2 * (inputs // group) * (8 * 16 + 32 * group // 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", int4.GROUPS)
def test_multiplies_where_the_weights_are(group, dtype, device) -> None:
    for outputs, groups, wide in ((16, 3, 0), (70, 9, 0), (33, 1, 8), (40, 2, 3)):
        inputs = groups * group
        given = matrix(outputs, inputs, group, seed=outputs)
        packed = int4.pack(*(part.to(device) for part in given), group)
        if device.type == "cuda" or hasattr(_C, "launches"):
            assert packed.numel() == bytes_on_cuda(outputs, inputs, group)
        random = torch.Generator().manual_seed(1)
        x = torch.randn(70, inputs + wide, generator=random).to(device, dtype)[:, wide:]
        wanted = x.double().cpu() @ dequantised(*given, group).T
        y = int4.product(x, packed, outputs, group)
        assert y.dtype == dtype
        assert (y.double().cpu() - wanted).norm() < 0.015 * wanted.norm()
        for tokens in range(1, 71) if groups == 2 else (1, 8, 9, 16, 17, 32, 33, 64, 65):
            assert int4.product(x[-tokens:], packed, outputs, group).equal(y[-tokens:])
        assert int4.product(x[:0], packed, outputs, group).shape == (0, outputs)


def test_a_product_of_a_layer_is_its_operators(device) -> None:
    for outputs, groups, tokens in (
        (64, 3, 1),
        (128, 9, 5),
        (192, 17, 8),
        (64, 2, 20),
        (192, 2, 70),
    ):
        given = matrix(outputs, groups * 128, 128, seed=outputs)
        packed = int4.pack(*(part.to(device) for part in given), 128)
        random = torch.Generator().manual_seed(1)
        x, weight, residual = (
            torch.randn(*shape, generator=random).to(device, torch.bfloat16)
            for shape in ((tokens, groups * 128), (groups * 128,), (tokens, outputs))
        )
        form = x, packed, outputs, 128
        if device.type == "cpu" and not hasattr(_C, "launches"):
            with pytest.raises(RuntimeError, match="x: expected a CUDA tensor"):
                int4.layer_product(*form, False, weight, 1e-5, None)
            return
        for norm in (None, weight):
            normed = x if norm is None else decoder.rms_norm(x, norm, 1e-5)
            plain = int4.product(normed, *form[1:])
            made = int4.layer_product(*form, False, norm, 1e-5, residual)
            assert made.equal(plain + residual)
            assert int4.layer_product(*form, False, norm, 1e-5, None).equal(plain)
            gates = int4.layer_product(*form, True, norm, 1e-5, None)
            assert gates.equal(decoder.gated(plain))


def test_heads_after_a_product_are_its_operators(device) -> None:
    for width, heads, groups, rows, tokens, normed in (
        (64, 3, 1, 2, 4, True),
        (128, 2, 2, 1, 9, True),
        (256, 1, 1, 3, 1, False),
        (96, 1, 1, 1, 2, True),
        (64, 2, 1, 1, 33, True),
    ):
        outputs = (heads + 2 * groups) * width
        packed = int4.pack(*(part.to(device) for part in matrix(outputs, 256, 128)), 128)
        random = torch.Generator().manual_seed(width)

        def numbers(*shape: int, random: torch.Generator = random) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(device, torch.bfloat16)

        x, weight, bias = numbers(rows * tokens, 256), numbers(256), numbers(outputs)
        norm = weight if normed else None
        angles = numbers(40, width), numbers(40, width)
        lengths = torch.arange(rows, device=device) * 4
        counts = torch.full((rows,), tokens, device=device) - (lengths == 4).long()
        norms = numbers(width), numbers(width)
        for added, own in ((None, (None, None)), (bias, (None, None)), (bias, norms)):
            caches = [numbers(rows, groups, 8 + tokens, width) for _ in range(2)]
            others = [cache.clone() for cache in caches]
            states = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2)]
            more = lengths, counts, heads, *own, 1e-6
            form = x, packed, outputs, 128, norm, 1e-5, added, *angles, None
            if device.type == "cpu" and not hasattr(_C, "launches"):
                with pytest.raises(RuntimeError, match="x: expected a CUDA tensor"):
                    int4.rotary_product(*form, *caches, states[0], *more)
                return
            made = int4.rotary_product(*form, *caches, states[0], *more)
            product = int4.layer_product(*form[:4], False, *form[4:6], None)
            wanted = decoder.rotary_append(product, added, *angles, None, *others, states[1], *more)
            assert made.equal(wanted)
            assert states[0].equal(states[1])
            assert all(map(torch.equal, caches, others))


def test_shapes_on_cuda() -> None:
    """Without numbers: the packed bytes, and that a product of 32 tokens is one launch."""
    for outputs, inputs, group in ((16, 96, 32), (70, 256, 128), (8192, 512, 256)):
        with fake_cuda.launches() as counted, torch.device("cuda"):
            values = torch.empty(outputs, inputs, dtype=torch.uint8)
            scales = torch.empty(outputs, inputs // group)
            packed = int4.pack(values, scales, scales, group)
            assert packed.shape == (bytes_on_cuda(outputs, inputs, group),)
            counted.counts.clear()
            y = int4.product(torch.empty(32, inputs, dtype=torch.bfloat16), packed, outputs, group)
            assert y.shape == (32, outputs)
        assert counted.counts == {"int4_product": 1}


def test_refusals_name_the_argument() -> None:
    values, scales, zeros = matrix(16, 64, 64)
    packed = int4.pack(values, scales, zeros, 64)
    x = torch.randn(2, 64)
    for call, message in (
        (lambda: int4.round_to_nearest(x.double(), 64), "weights: expected float32"),
        (lambda: int4.round_to_nearest(x[0], 64), "weights: expected 2 dimensions"),
        (lambda: int4.round_to_nearest(x.T, 32), "weights: expected unit stride"),
        (lambda: int4.round_to_nearest(x, 128), "inputs: expected a multiple of group"),
        (lambda: int4.round_to_nearest(x, 64, x[0, :60]), "importance: expected size 64"),
        (lambda: int4.round_to_nearest(x, 64, x[0].half()), "importance: expected a contiguous"),
        (lambda: int4.pack(values, scales, zeros, 48), "group: expected 32, 64, 128 or 256"),
        (lambda: int4.pack(values, scales, zeros, 128), "inputs: expected a multiple of group"),
        (lambda: int4.pack(values + 16, scales, zeros, 64), "values: expected numbers in"),
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
    torch.library.opcheck(operators.int4_round, (torch.randn(3, 64), torch.rand(64), 32, True))
    torch.library.opcheck(operators.int4_pack, (values, scales, zeros, 32, True))
    torch.library.opcheck(operators.int4_unpack, (packed, 20, 64, 32, False))
    torch.library.opcheck(operators.int4_product, (torch.randn(3, 64), packed, 20, 32, False))
