"""Time products of a few tokens with 4-bit weights beside torch's and bfloat16, in turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import output, timing
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError
from polyspec_ext.levels.products import DenseLinear, OneDnnLinear, PackedLinear, in_huge_pages
from polyspec_ext.ops import int4
from polyspec_ext.quantization.weights import CudaInt4Linear, Int4Weights

GROUP = 128
COLD = 96 << 20  # bytes of different weights in a turn, more than caches store
Product = Callable[[torch.Tensor], object]


def contenders(outputs: int, inputs: int, device: str) -> dict[str, list[Product]]:
    """Return products by name, as many with separate weights as fill `COLD`."""
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=random)
    form = (outputs, inputs // GROUP)
    scales, zeros = torch.rand(form, generator=random), torch.randn(form, generator=random)
    weight = torch.randn(outputs, inputs, generator=random).bfloat16().to(device)

    def plain() -> Product:
        copy = weight.clone()
        return lambda x: torch.nn.functional.linear(x, copy)

    if device == "cuda":
        weights = Int4Weights(values, scales, zeros).to(device)
        kinds: dict[str, Callable[[], Product]] = {
            "polyspec": lambda: CudaInt4Linear(weights).product,
            "torch int4": partial(_torch_on_cuda, weights),
        }
    else:
        kinds = _on_cpu(values, scales, zeros, weight)
    kinds["torch bfloat16"] = plain
    sizes = {name: (2 if "bfloat16" in name else 0.5) * weight.numel() for name in kinds}
    return {
        name: [make() for _ in range(max(1, int(COLD / sizes[name])))]
        for name, make in kinds.items()
    }


def torch_form(weights: Int4Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in the format of torch's CUDA operator: numbers in tiles of 16 inputs and 8
    outputs, padded to whole tiles, and pairs of scales and zeros."""
    padding = (0, 0, 0, -weights.values.shape[0] % 8)
    values, scales, zeros = (torch.nn.functional.pad(x, padding) for x in weights.tensors)
    pairs = values[:, ::2] << 4 | values[:, 1::2]  # the even input is the high nibble
    # The most adjacent tiles that divide the inputs; 2 divide whole groups.
    together = next(n for n in (8, 4, 2) if values.shape[1] % (16 * n) == 0)
    both = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, together), both


def _torch_on_cuda(weights: Int4Weights) -> Product:
    packed, both = torch_form(weights)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, weights.group, both)


def _on_cpu(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, weight: torch.Tensor
) -> dict[str, Callable[[], Product]]:
    outputs, inputs = values.shape
    packed = int4.pack(values, scales, zeros, GROUP)

    def ours() -> Product:
        copy = in_huge_pages(packed)
        return lambda x: int4.product(x, copy, outputs, GROUP)

    def theirs() -> Product:
        copy = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
        both = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, copy, GROUP, both)

    def bfloat16(kind: type[PackedLinear]) -> Product:
        layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        return kind([layer])

    kinds: dict[str, Callable[[], Product]] = {"polyspec": ours}
    if outputs % 16 == 0:
        kinds["torch int4"] = theirs
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds["oneDNN bfloat16, packed"] = partial(bfloat16, OneDnnLinear)
    kinds["polyspec bfloat16"] = partial(bfloat16, DenseLinear)
    return kinds


def _all_of(products: list[Product], x: torch.Tensor) -> None:
    for product in products:
        product(x)


@torch.inference_mode()
def measure(
    outputs: int, inputs: int, tokens: Sequence[int], repeats: int, device: str
) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the median microseconds and GB/s of weights by contender and number of tokens."""
    made = contenders(outputs, inputs, device)
    keys = {f"{name}, {count} tokens": (name, count) for count in tokens for name in made}
    activations = {count: torch.randn(count, inputs).bfloat16().to(device) for count in tokens}
    passes = [
        timing.Contender(label, partial(_all_of, made[name], activations[count]))
        for label, (name, count) in keys.items()
    ]
    done, failures = timing.measure(passes, repeats, timing.Clock(device))
    for label, reason in failures.items():
        raise PolyspecError(f"{label}: {reason}")
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in made}
    for one in done:
        name, count = keys[one.name]
        seconds = statistics.median(one.seconds) / len(made[name])
        bits = 16 if "bfloat16" in name else 4 + 32 / GROUP  # with bfloat16 scales and zeros
        found[name][count] = (1e6 * seconds, 1e-9 * outputs * inputs * bits / 8 / seconds)
    return found


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report."""
    output.require_device(args.device)
    return {
        **output.header("int4", 1, args.device),
        "settings": {"repeats": args.repeats, "group": GROUP, "tokens": args.tokens},
        "copy_gbs": timing.copy_bandwidth(args.device),
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
        "Microseconds per product (GB/s of its weights), bfloat16 activations, groups of "
        f"{settings['group']}, weights that no cache holds: medians of {settings['repeats']} "
        "turns.",
    ]
    heads = ["", *map(output.token_count, settings["tokens"])]
    for shape, rows in report["shapes"].items():
        cells = (
            [name, *(f"{us:.0f} ({gbs:.1f})" for us, gbs in times.values())]
            for name, times in rows.items()
        )
        lines += ["", f"## {shape}", "", *output.table(heads, cells)]
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
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
