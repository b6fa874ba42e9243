"""``benchmarks preflight``: a minute that says what every later number on a device is made of.

Copy bandwidth, microseconds of a graph's node, products of 1 to 60 tokens in bfloat16 and 4 bits,
attention over a mask, `sample` and `verify` alone, and decoder layers as they are beside the same
layers through `torch.compile`. The file of ``--json-file`` is written after every part, and a part
that fails is a message in its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import machine, output, timing
from benchmarks.shapes import SHAPES, Shape, random_model
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.quantization.weights import CudaInt4Linear, round_to_nearest

SCHEMA = 1  # of the JSON report
TOKENS = (1, 5, 9, 13, 60)  # of a product
WIDTHS, SPANS = (1, 5, 13), (128, 1024)  # tokens of a pass, keys that they attend to
NODES = 500  # of a graph that measures a node
LAYERS = 4
DRAFTED = 5
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "no filter": {}, "top-k, top-p": {"top_k": 50, "top_p": 0.9},
}  # fmt: skip
PACKAGES = ("flashinfer", "gguf", "hypothesis", "pybind11", "scipy", "triton", "vllm", "xdist")
SHAPE = {"cuda": SHAPES["llama2-7b"], "cpu": Shape("small", 256, 512, 4, 4, 4, 2048)}

Numbers = dict[str, Any]


class Preflight:
    """The parts of the report.

    Args:
        device: "cpu" or "cuda".
        repeats: turns of a measurement, of which the median counts.
        compile: also time the layers through `torch.compile`.
    """

    def __init__(self, device: str, repeats: int, compile: bool) -> None:
        self.device, self.repeats, self.compile = device, repeats, compile
        self.clock = timing.clock_of(device)
        self.shape = SHAPE[device]

    # In the order in which they are worth most.
    PARTS = ("properties", "copy", "node", "operators", "products", "attention", "layers")

    def microseconds(self, call: Callable[[], Any]) -> float:
        """Return the median microseconds of a call, in a replayed graph on CUDA.

        Raises:
            RuntimeError: the call fails, or cannot be captured.
        """
        timed, failures = timing.measure([timing.Contender("call", call)], self.repeats, self.clock)
        if failures:
            raise RuntimeError(failures["call"])
        if self.device == "cuda" and not timed[0].captured:
            raise RuntimeError("the call cannot be captured")
        return 1e6 * statistics.median(timed[0].seconds)

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device).bfloat16()

    def properties(self) -> Numbers:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if self.device == "cpu":
            return {"missing": missing}
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        names = ("multi_processor_count", "L2_cache_size", "total_memory", "major", "minor")
        return {"missing": missing, **{name: getattr(found, name) for name in names}}

    def copy(self) -> Numbers:
        return {"gbs": timing.copy_bandwidth(self.clock, self.device)}

    def node(self) -> Numbers:
        x = torch.zeros(1, device=self.device)

        def nodes() -> None:
            for _ in range(NODES):
                x.add_(1)

        return {"us": self.microseconds(nodes) / NODES}

    def operators(self) -> Numbers:
        numbers = {}
        seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        for vocab in (32000, 128256):
            target = self.randn(1, DRAFTED + 1, vocab)
            draft = target[:, :DRAFTED].contiguous()
            tokens = draft.argmax(-1)
            for name, filters in FILTERS.items():
                given: Any = {"seed": seed, **filters}
                sample = partial(ps.sample, target[:, 0], **given)
                verify = partial(ps.verify, target, tokens, draft, **given)
                numbers[f"sample, {name}, {vocab}"] = self.microseconds(sample)
                numbers[f"verify, {name}, {vocab}"] = self.microseconds(verify)
        return numbers

    def products(self) -> Numbers:
        inputs, outputs = self.shape.hidden, 2 * self.shape.inner
        weight = self.randn(outputs, inputs) * 0.02
        numbers = {}
        for tokens in TOKENS:
            x = self.randn(tokens, inputs)
            product = partial(torch.nn.functional.linear, x, weight)
            numbers[f"bfloat16, {tokens}"] = self.microseconds(product)
        if self.device == "cuda":
            layer = CudaInt4Linear(round_to_nearest(weight.cpu(), 128), device=self.device)
            for tokens in TOKENS:
                x = self.randn(tokens, inputs)
                exact = x.float() @ weight.float().T
                numbers[f"4 bits, {tokens}"] = self.microseconds(partial(layer, x))
                error = (layer(x).float() - exact).norm() / exact.norm()
                numbers[f"4 bits, {tokens}, relative error"] = float(error)
        return {"weights": outputs * inputs, **numbers}

    def attention(self) -> Numbers:
        heads, dim = self.shape.heads, self.shape.head_dim
        attend = torch.nn.functional.scaled_dot_product_attention
        numbers = {}
        for span in SPANS:
            keys = self.randn(1, heads, span, dim)
            for width in WIDTHS:
                query = self.randn(1, heads, width, dim)
                mask = torch.zeros(1, 1, width, span, device=self.device).bfloat16()
                call = partial(attend, query, keys, keys, mask)
                numbers[f"{width} of {span}"] = self.microseconds(call)
        return numbers

    def layers(self) -> Numbers:
        """Measure decoder layers as they are and by `torch.compile`: are fused layers worth it?"""
        model = random_model(replace(self.shape, layers=LAYERS), torch.bfloat16, self.device).model
        numbers: Numbers = {"layers": LAYERS}

        def run(x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            for layer in model.layers:
                x = layer(x, position_embeddings=positions, attention_mask=None)
            return x

        for width in WIDTHS:
            x = self.randn(1, width, self.shape.hidden)
            positions = model.rotary_emb(x, torch.arange(width, device=self.device)[None])
            ways = {"eager": run}
            if self.compile:
                ways["compiled"] = torch.compile(run, dynamic=False, fullgraph=True)
            for name, way in ways.items():
                call = partial(way, x, positions)
                call()
                numbers[f"{name}, {width}"] = self.microseconds(call)
                if self.device == "cuda" and width == WIDTHS[0]:
                    numbers[f"{name}, kernels"] = self.kernels(call)
        return numbers

    @staticmethod
    def kernels(call: Callable[[], Any]) -> int:
        """Return how many kernels a call launches."""
        cuda = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[cuda]) as profile:
            call()
            torch.cuda.synchronize()
        events = profile.events() or ()
        return sum(str(event.device_type).endswith("CUDA") for event in events)


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts; return the JSON report."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu where torch sees no CUDA device, given cuda")
    report: dict[str, Any] = {
        **machine.header("preflight", SCHEMA, args.device),
        "settings": {"repeats": args.repeats, "shape": SHAPE[args.device].name},
        "parts": {},
    }
    preflight = Preflight(args.device, args.repeats, args.compile == "all")
    for name in progress.bar(Preflight.PARTS, desc="preflight", leave=False):
        try:
            report["parts"][name] = getattr(preflight, name)()
        except Exception as error:  # the next part may still tell something
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            report["parts"][name] = {"error": message}
        output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table; microseconds, but for what is named otherwise."""
    cells = [
        [part, name, format(value, ".2f") if isinstance(value, float) else str(value)]
        for part, numbers in report["parts"].items()
        for name, value in numbers.items()
    ]
    title = f"# Preflight, {report['machine']['device_name']}, shape {report['settings']['shape']}"
    table = output.table(("part", "", "us"), cells, [2])
    return "\n".join([title, "", f"{machine.conditions(report)}.", "", *table])


def _status(report: dict[str, Any]) -> int:
    return int(any("error" in numbers for numbers in report["parts"].values()))


def add_command(kinds: Any) -> None:
    """Add ``preflight`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "preflight",
        help="what a device's later numbers are made of",
        description="Copy bandwidth, a graph's node, products, attention, sample and verify, and "
        "decoder layers as they are and through torch.compile, each in microseconds. Prints "
        "Markdown, or JSON. A part that fails is named, and the status is 1.",
    )
    options.share(sub, "--device")
    output.add_report(sub, report_of, markdown, _status)
    options.add_count(sub, "--repeats", 20, "turns")
    sub.add_argument(
        "--compile",
        choices=("none", "all"),
        default="all",
        help="none: leave torch.compile out (default: %(default)s)",
    )
