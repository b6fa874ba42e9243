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


class Preflight:
    """The parts of the report: numbers by name, or calls to time."""

    def __init__(self, device: str, repeats: int, compile: bool) -> None:
        self.device, self.repeats, self.compile = device, repeats, compile
        self.clock, self.shape = measuring.Clock(device), SHAPE[device]

    # By decreasing importance.
    PARTS = ("properties", "copy", "node", "attention", "norms", "layers")

    def numbers(self, part: str) -> dict[str, Any]:
        """Return the numbers of a part; for calls, median microseconds."""
        result = getattr(self, part)()
        return result if isinstance(result, dict) else {n: self.microseconds(c) for n, c in result}

    def microseconds(self, call: Callable[[], Any]) -> float:
        """Return the median microseconds of a call, in a replayed graph on CUDA."""
        (timed, *_) = measuring.turns([measuring.Contender("call", call)], self.repeats, self.clock)
        if timed.error is not None:
            raise RuntimeError(timed.error)
        if self.device == "cuda" and not timed.captured:
            raise RuntimeError("the call cannot be captured")
        return 1e6 * statistics.median(timed.seconds)

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device).bfloat16()

    def properties(self) -> dict[str, Any]:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if self.device == "cpu":
            return {"missing": missing}
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        names = ("multi_processor_count", "L2_cache_size", "total_memory", "major", "minor")
        return {"missing": missing, **{name: getattr(facts, name) for name in names}}

    def copy(self) -> dict[str, Any]:
        return {"gbs": measuring.copy_bandwidth(self.device)}

    def node(self) -> dict[str, Any]:
        x = torch.zeros(1, device=self.device)

        def nodes() -> None:
            for _ in range(NODES):
                x.add_(1)

        return {"us": self.microseconds(nodes) / NODES}

    def attention(self) -> Calls:
        heads, dim = self.shape.heads, self.shape.head_dim
        attend = torch.nn.functional.scaled_dot_product_attention
        for span in SPANS:
            keys = self.randn(1, heads, span, dim)
            for width in WIDTHS:
                query = self.randn(1, heads, width, dim)
                mask = torch.zeros(1, 1, width, span, device=self.device).bfloat16()
                yield f"{width} of {span}, torch", partial(attend, query, keys, keys, mask)
                ours = partial(decoder.attention, query, keys, keys, None, dim**-0.5, causal=True)
                yield f"{width} of {span}, polyspec", ours

    def norms(self) -> Calls:
        width = self.shape.hidden
        weight = self.randn(width)
        for tokens in WIDTHS:
            x = self.randn(tokens, width)
            torch_norm = partial(torch.nn.functional.rms_norm, x, (width,), weight, 1e-5)
            yield f"{tokens}, torch", torch_norm
            yield f"{tokens}, polyspec", partial(decoder.rms_norm, x, weight, 1e-5)
            yield (
                f"{tokens}, polyspec, with a sum",
                partial(decoder.add_rms_norm, x, x, weight, 1e-5),
            )

    def layers(self) -> Calls:
        """Yield decoder layers, eager and by `torch.compile`, to estimate the gain of fusion."""
        model = random_model(replace(self.shape, layers=LAYERS), torch.bfloat16, self.device).model

        def run(x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            for layer in model.layers:
                x = layer(x, position_embeddings=positions, attention_mask=None)
            return x

        for width in WIDTHS:
            x = self.randn(1, width, self.shape.hidden)
            positions = model.rotary_emb(x, torch.arange(width, device=self.device)[None])
            yield f"{LAYERS} layers, eager, {width}", partial(run, x, positions)
            if self.compile:
                compiled = torch.compile(run, dynamic=False, fullgraph=True)
                compiled(x, positions)
                yield f"{LAYERS} layers, compiled, {width}", partial(compiled, x, positions)


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts; return the JSON report."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu where torch sees no CUDA device, given cuda")
    report = output.header("preflight", 3, args.device)
    report["settings"] = {"repeats": args.repeats, "shape": SHAPE[args.device].name}
    parts: dict[str, Any] = {}
    report["parts"] = parts
    preflight = Preflight(args.device, args.repeats, args.compile == "all")
    for name in progress.bar(Preflight.PARTS, desc="preflight", leave=False):
        try:
            parts[name] = preflight.numbers(name)
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
