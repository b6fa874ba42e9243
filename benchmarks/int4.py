"""``benchmarks int4``: the 4-bit product beside torch's own operator and bfloat16 weights,
by number of tokens, in turns within one run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import machine, output, timing
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError
from polyspec_ext.levels.products import DenseLinear, OneDnnLinear, PackedLinear, in_huge_pages
from polyspec_ext.ops import int4

SCHEMA = 1  # of the JSON report
TOKENS = (1, 2, 4, 6, 8, 12, 16)
SHAPES = ("4096x4096", "1024x2560", "5120x1024")
GROUP = 128
COLD = 96 << 20  # bytes of different weights that a turn goes through, so that no cache holds them


def shapes_of(texts: list[str]) -> list[tuple[int, int]]:
    """Outputs and inputs of "NxK" each; ValueError where one is something else."""
    found = []
    for text in texts:
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"--shapes: expected outputs x inputs, as 4096x4096, given {text!r}")
        outputs, inputs = map(int, parts)
        if inputs % GROUP:
            raise ValueError(f"--shapes: expected inputs that {GROUP} divides, given {inputs}")
        found.append((outputs, inputs))
    return found


Product = Callable[[torch.Tensor], object]


def contenders(outputs: int, inputs: int) -> dict[str, list[Product]]:
    """By name, as many products with weights of their own as fill `COLD`."""
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=random)
    form = (outputs, inputs // GROUP)
    scales, zeros = torch.rand(form, generator=random), torch.randn(form, generator=random)
    packed = int4.pack(values, scales, zeros, GROUP)
    made: dict[str, list[Product]] = {}

    def add(name: str, size: int, make: Callable[[], Product]) -> None:
        made[name] = [make() for _ in range(max(1, COLD // size))]

    def ours() -> Product:
        own = in_huge_pages(packed)
        return lambda x: int4.product(x, own, outputs, GROUP)

    def theirs() -> Product:
        own = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
        both = torch.stack([scales.T, zeros.T], -1).bfloat16().contiguous()
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, own, GROUP, both)

    weight = torch.randn(outputs, inputs, generator=random).bfloat16()

    def plain() -> Product:
        own = weight.clone()
        return lambda x: torch.nn.functional.linear(x, own)

    def bfloat16(kind: type[PackedLinear]) -> Product:
        layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        return kind([layer])

    add("polyspec", packed.numel(), ours)
    if outputs % 16 == 0:
        add("torch int4", packed.numel(), theirs)
    add("torch bfloat16", 2 * weight.numel(), plain)
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        add("oneDNN bfloat16, packed", 2 * weight.numel(), lambda: bfloat16(OneDnnLinear))
    add("polyspec bfloat16", 2 * weight.numel(), lambda: bfloat16(DenseLinear))
    return made


@torch.inference_mode()
def measure(
    outputs: int, inputs: int, tokens: list[int], repeats: int, clock: timing.Clock
) -> list[dict[str, Any]]:
    """A row per contender and number of tokens: the median of the turns in microseconds."""
    made = contenders(outputs, inputs)
    keys = {f"{name}, {count}": (name, count) for count in tokens for name in made}
    passes = []
    for label, (name, count) in keys.items():
        x = torch.randn(count, inputs).bfloat16()
        passes.append(timing.Contender(label, partial(_all_of, made[name], x)))
    timed, failures = timing.measure(passes, repeats, clock)
    for label, reason in failures.items():
        raise PolyspecError(f"{label} tokens: {reason}")
    rows = []
    for one in timed:
        name, count = keys[one.name]
        seconds = statistics.median(one.seconds) / len(made[name])
        bits = 16 if "bfloat16" in name else 4 + 32 / GROUP  # with bfloat16 scales and zeros
        rows.append(
            {
                "outputs": outputs,
                "inputs": inputs,
                "name": name,
                "tokens": count,
                "us": 1e6 * seconds,
                "gbs": 1e-9 * outputs * inputs * bits / 8 / seconds,
            }
        )
    return rows


def _all_of(products: list[Product], x: torch.Tensor) -> None:
    for product in products:
        product(x)


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    before = machine.load_average()
    rows = []
    clock = timing.CpuClock(processor_time=args.processor_time)
    for outputs, inputs in shapes_of(args.shapes or list(SHAPES)):
        rows += measure(outputs, inputs, args.tokens or list(TOKENS), args.repeats, clock)
    copy = timing.copy_bandwidth(timing.CpuClock(), "cpu")
    return {
        **machine.header("int4", SCHEMA, "cpu"),
        "settings": {"repeats": args.repeats, "group": GROUP},
        "copy_gbs": copy,
        "load": {"before": before, "after": machine.load_average()},
        "rows": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [
        f"# 4-bit product, {report['machine']['cpu']}",
        "",
        f"{machine.conditions(report)}; copy bandwidth "
        f"{report['copy_gbs']:.1f} GB/s. Microseconds per product (GB/s of its weights), "
        f"bfloat16 activations, groups of {report['settings']['group']}, weights that no cache "
        f"holds: medians of {report['settings']['repeats']} turns.",
    ]
    rows = report["rows"]
    for shape in dict.fromkeys((row["outputs"], row["inputs"]) for row in rows):
        some = [row for row in rows if (row["outputs"], row["inputs"]) == shape]
        tokens = sorted({row["tokens"] for row in some})
        lines += ["", f"## {shape[0]} outputs, {shape[1]} inputs", ""]
        cells: dict[str, dict[int, str]] = {}
        for row in some:
            cells.setdefault(row["name"], {})[row["tokens"]] = f"{row['us']:.0f} ({row['gbs']:.1f})"
        lines += output.table(
            ["", *map(output.token_count, tokens)],
            ([name, *(own[n] for n in tokens)] for name, own in cells.items()),
        )
    return "\n".join(lines)


def add_command(kinds: Any) -> None:
    """Adds ``int4`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "int4",
        help="the product with 4-bit weights beside torch's",
        description="Products of a few tokens with 4-bit weights, beside torch's int4 operator "
        "and bfloat16 weights, in turns within one run. Prints Markdown, or JSON.",
    )
    output.add_report(sub, report_of, markdown)
    options.add_count(sub, "--repeats", 15, "turns")
    sub.add_argument(
        "--tokens", type=options.COUNTS, metavar="M,...", help="(default: 1,2,4,6,8,12,16)"
    )
    sub.add_argument(
        "--shapes",
        type=options.words,
        metavar="NxK,...",
        help="outputs x inputs (default: 4096x4096,1024x2560,5120x1024)",
    )
    options.add_processor_time(sub)
