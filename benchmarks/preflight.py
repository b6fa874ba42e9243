"""Time the components of all later numbers on a device, in a minute.

Copy bandwidth, microseconds of a graph's node, attention, norms, and decoder layers, eager and
through `torch.compile`. (`kernels` times operators, `int4` products.) The file of ``--json-file``
is written after every part. A part that fails is named, and the status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import measuring, output
from benchmarks.shapes import SHAPES, Shape, random_model
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.ops import decoder

WIDTHS, SPANS = (1, 5, 13), (128, 1024)  # tokens of a pass, keys that they attend to
NODES = 500  # of a graph that measures a node
LAYERS = 4
PACKAGES = ("flashinfer", "gguf", "hypothesis", "pybind11", "scipy", "triton", "vllm", "xdist")
SHAPE = {"cuda": SHAPES["llama2-7b"], "cpu": Shape("small", 256, 512, 4, 4, 4, 2048)}

Calls = Iterator[tuple[str, Callable[[], Any]]]  # timed calls by name


def properties(device: str) -> dict[str, Any]:
    """Return the packages that are missing, and facts of the GPU."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    names = ("multi_processor_count", "L2_cache_size", "total_memory", "major", "minor")
    facts = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {"missing": missing, **{name: getattr(facts, name) for name in names if facts}}


def attention(shape: Shape, device: str) -> Calls:
    """Yield attention of some tokens, torch's and this package's."""
    attend = torch.nn.functional.scaled_dot_product_attention
    for span in SPANS:
        keys = torch.randn(1, shape.heads, span, shape.head_dim, device=device).bfloat16()
        for width in WIDTHS:
            query = keys[:, :, :width].clone()
            mask = torch.zeros(1, 1, width, span, device=device).bfloat16()
            yield f"{width} of {span}, torch", partial(attend, query, keys, keys, mask)
            scale = shape.head_dim**-0.5
            ours = partial(decoder.attention, query, keys, keys, None, scale, causal=True)
            yield f"{width} of {span}, polyspec", ours


def norms(shape: Shape, device: str) -> Calls:
    """Yield RMS norms, torch's and this package's."""
    weight = torch.randn(shape.hidden, device=device).bfloat16()
    rms_norm = torch.nn.functional.rms_norm
    for tokens in WIDTHS:
        x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
        yield f"{tokens}, torch", partial(rms_norm, x, (shape.hidden,), weight, 1e-5)
        yield f"{tokens}, polyspec", partial(decoder.rms_norm, x, weight, 1e-5)
        summed = partial(decoder.add_rms_norm, x, x, weight, 1e-5)
        yield f"{tokens}, polyspec, with a sum", summed


def layers(shape: Shape, device: str, compiled: bool) -> Calls:
    """Yield decoder layers, eager and by `torch.compile`, to estimate the gain of fusion."""
    model = random_model(replace(shape, layers=LAYERS), torch.bfloat16, device).model

    def run(x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x, position_embeddings=positions, attention_mask=None)
        return x

    for width in WIDTHS:
        x = torch.randn(1, width, shape.hidden, device=device).bfloat16()
        positions = model.rotary_emb(x, torch.arange(width, device=device)[None])
        yield f"{LAYERS} layers, eager, {width}", partial(run, x, positions)
        if compiled:
            fast = torch.compile(run, dynamic=False, fullgraph=True)
            fast(x, positions)
            yield f"{LAYERS} layers, compiled, {width}", partial(fast, x, positions)


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts; return the JSON report."""
    device, shape = args.device, SHAPE[args.device]
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu where torch sees no CUDA device, given cuda")
    report, clock = output.header("preflight", 3, device), measuring.Clock(device)
    report["settings"] = {"repeats": args.repeats, "shape": shape.name}
    number = torch.zeros(1, device=device)

    def microseconds(call: Callable[[], Any]) -> float:
        (timed, *_) = measuring.turns([measuring.Contender("call", call)], args.repeats, clock)
        if timed.error is not None:
            raise RuntimeError(timed.error)
        if device == "cuda" and not timed.captured:
            raise RuntimeError("the call cannot be captured")
        return 1e6 * statistics.median(timed.seconds)

    def nodes() -> None:
        for _ in range(NODES):
            number.add_(1)

    def each(calls: Calls) -> dict[str, float]:
        return {name: microseconds(call) for name, call in calls}

    # By decreasing importance.
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "properties": lambda: properties(device),
        "copy": lambda: {"gbs": measuring.copy_bandwidth(device)},
        "node": lambda: {"us": microseconds(nodes) / NODES},
        "attention": lambda: each(attention(shape, device)),
        "norms": lambda: each(norms(shape, device)),
        "layers": lambda: each(layers(shape, device, args.compile == "all")),
    }
    parts = report["parts"] = dict[str, Any]()
    for name in progress.bar(measured, desc="preflight", leave=False):
        try:
            parts[name] = measured[name]()
        except Exception as error:  # the next part may succeed
            traceback.print_exc()
            parts[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table; microseconds, unless a name has another unit."""
    cells = [
        [group, name, format(value, ".2f") if isinstance(value, float) else str(value)]
        for group, numbers in report["parts"].items()
        for name, value in numbers.items()
    ]
    title = f"# Preflight, {report['machine']['device_name']}, shape {report['settings']['shape']}"
    table = output.table(("part", "", "us"), cells, [2])
    return "\n".join([title, "", f"{output.conditions(report)}.", "", *table])


def status(report: dict[str, Any]) -> int:
    """Return 1 if a part failed."""
    return int(any("error" in numbers for numbers in report["parts"].values()))


OPTIONS = (
    "--device",
    ("--repeats", options.COUNT, 20, "N", "turns"),
    ("--compile", ("none", "all"), "all", None, ""),
)
