"""Time products of a few tokens with 4-bit weights beside torch's and bfloat16, in turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import measuring, output
from polyspec_ext.cli import options
from polyspec_ext.levels.products import DenseLinear, OneDnnLinear, in_huge_pages
from polyspec_ext.quantization import weights as int4
from polyspec_ext.quantization.weights import CudaInt4Linear, Int4Weights

GROUP = 128
COLD = 96 << 20  # bytes of different 4-bit weights in a turn, more than caches store
Product = Callable[[torch.Tensor], object]


def contenders(outputs: int, inputs: int, device: str) -> dict[str, list[Product]]:
    """Return products by name, of each as many with separate weights as fill `COLD` in 4 bits, so
    that the start of a turn has the same share in all of their times."""
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=random)
    form = (outputs, inputs // GROUP)
    scales, zeros = torch.rand(form, generator=random), torch.randn(form, generator=random)
    weight = torch.randn(outputs, inputs, generator=random).bfloat16().to(device)
    kinds: dict[str, Callable[[], Product]] = {}
    if device == "cuda":
        weights = Int4Weights(values, scales, zeros).to(device)
        tiles, scales_zeros = torch_form(weights)
        kinds["polyspec"] = lambda: CudaInt4Linear(weights).product
        options = {"qGroupSize": GROUP, "qScaleAndZeros": scales_zeros}
        kinds["torch int4"] = lambda: partial(
            torch.ops.aten._weight_int4pack_mm, mat2=tiles.clone(), **options
        )
        kinds["polyspec bfloat16"] = lambda: partial(
            torch.ops.polyspec.dense_product, packed=weight.clone(), outputs=outputs, bias=None
        )
    else:
        packed = int4.pack(values, scales, zeros, GROUP)
        layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        sizes = {"outputs": outputs, "group": GROUP}
        kinds["polyspec"] = lambda: partial(int4.product, packed=in_huge_pages(packed), **sizes)
        scales_zeros = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
        options = {"qGroupSize": GROUP, "qScaleAndZeros": scales_zeros}
        pack = partial(torch.ops.aten._convert_weight_to_int4pack_for_cpu, values.int(), 1)
        if outputs % 16 == 0:
            theirs = torch.ops.aten._weight_int4pack_mm_for_cpu
            kinds["torch int4"] = lambda: partial(theirs, mat2=pack(), **options)
        if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            kinds["oneDNN bfloat16, packed"] = partial(OneDnnLinear, [layer])
        kinds["polyspec bfloat16"] = partial(DenseLinear, [layer])
    kinds["torch bfloat16"] = lambda: partial(torch.nn.functional.linear, weight=weight.clone())
    count = max(1, 2 * COLD // weight.numel())
    return {name: [make() for _ in range(count)] for name, make in kinds.items()}


def torch_form(weights: Int4Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in the format of torch's CUDA operator: numbers in tiles of 16 inputs and 8
    outputs, padded to whole tiles, and pairs of scales and zeros."""
    padding = (0, 0, 0, -weights.values.shape[0] % 8)
    values, scales, zeros = (torch.nn.functional.pad(x, padding) for x in weights.tensors)
    pairs = values[:, ::2] << 4 | values[:, 1::2]  # the even input is the high nibble
    # The most adjacent tiles that divide the inputs; 2 divide whole groups.
    together = next(n for n in (8, 4, 2) if values.shape[1] % (16 * n) == 0)
    scales_zeros = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, together), scales_zeros


@torch.inference_mode()
def measure(
    outputs: int, inputs: int, tokens: Sequence[int], repeats: int, device: str
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the median microseconds and GB/s of weights by contender and number of tokens."""
    products = contenders(outputs, inputs, device)
    activations = {count: torch.randn(count, inputs).bfloat16().to(device) for count in tokens}

    def run(name: str, count: int) -> None:
        for product in products[name]:
            product(activations[count])

    passes = {
        (name, count): measuring.Contender(f"{name}, {count} tokens", partial(run, name, count))
        for count in tokens
        for name in products
    }
    calls = measuring.turns(list(passes.values()), repeats, measuring.Clock(device))
    for _ in measuring.required(calls):
        pass
    results: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in products}
    for (name, count), contender in passes.items():
        seconds = statistics.median(contender.seconds) / len(products[name])
        bits = 16 if "bfloat16" in name else 4 + 32 / GROUP  # with bfloat16 scales and zeros
        results[name][count] = (1e6 * seconds, 1e-9 * outputs * inputs * bits / 8 / seconds)
    return results


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report."""
    output.require_device(args.device)
    return {
        **output.header("int4", 1, args.device),
        "settings": {"repeats": args.repeats, "group": GROUP, "tokens": args.tokens},
        "copy_gbs": measuring.copy_bandwidth(args.device),
        "shapes": {
            f"{outputs} outputs, {inputs} inputs": measure(
                outputs, inputs, args.tokens, args.repeats, args.device
            )
            for outputs, inputs in args.shapes
        },
    }


def markdown(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    settings = report["settings"]
    lines = [
        f"# 4-bit product, {report['machine']['device_name']}",
        "",
        f"{output.conditions(report)}; copy bandwidth {report['copy_gbs']:.1f} GB/s. "
        "Microseconds per product (GB/s of its weights), bfloat16 activations, groups "
        f"of {settings['group']}, weights that no cache holds: medians of {settings['repeats']} "
        "turns.",
    ]
    heads = ["", *(f"{count} token{'s' * (count > 1)}" for count in settings["tokens"])]
    for shape, rows in report["shapes"].items():
        cells = (
            [name, *(f"{us:.0f} ({gbs:.1f})" for us, gbs in times.values())]
            for name, times in rows.items()
        )
        lines += ["", f"## {shape}", "", *output.table(heads, cells)]
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(side.isdigit() and int(side) for side in parts):
        raise argparse.ArgumentTypeError(f"expected outputs x inputs, as 4096x4096, given {text!r}")
    outputs, inputs = map(int, parts)
    if inputs % GROUP:
        raise argparse.ArgumentTypeError(f"expected inputs that {GROUP} divides, given {inputs}")
    return outputs, inputs


OPTIONS = (
    "--device",
    ("--repeats", options.COUNT, 15, "N", "turns"),
    ("--tokens", options.COUNTS, [1, 2, 4, 6, 8, 12, 16], "M,...", ""),
    ("--shapes", options.listed(_shape), [(4096, 4096), (1024, 2560), (5120, 1024)], "NxK,...",
     "outputs x inputs"),
)  # fmt: skip
