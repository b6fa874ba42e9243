"""Measure the gain of dependent launch, and check that it changes no bit.

A pass over llama2-7b's fused layers, with 4-bit or bfloat16 weights, is captured in a CUDA graph
and replayed, in processes with POLYSPEC_DEPENDENT_LAUNCH=0 and =1 in turns. The model in
docs/gpu.md says that .35 to .5 ms of a 4-bit pass go.
Ends with 1 where the outputs of a pass differ. Needs a GPU of sm_90.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch

import polyspec_ext._C  # noqa: F401, registers the operators
from polyspec_ext.levels.fused import CachedLayers, entering, leaving
from polyspec_ext.levels.products import CudaLinear, RowProduct
from polyspec_ext.ops import decoder
from polyspec_ext.ops.decoder import LayerParts, LayerShape
from polyspec_ext.quantization.weights import CudaInt4Linear, Int4Weights

WIDTH, HEADS, GATED, LAYERS, EPSILON = 4096, 32, 11008, 32, 1e-5
SLOTS, LENGTH, TURNS, REPLAYS = 512, 300, 2, 50
DEVICE = "cuda"


def product_of(bits: int, outputs: int, inputs: int) -> RowProduct:
    """Return a product with random weights."""
    if bits == 16:
        layer = torch.nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=torch.bfloat16)
        return CudaLinear([layer])
    values = torch.randint(0, 16, (outputs, inputs), device=DEVICE, dtype=torch.uint8)
    scales = torch.full((outputs, inputs // 128), 0.2 / inputs**0.5, device=DEVICE)
    return CudaInt4Linear(Int4Weights(values, scales, torch.zeros_like(scales)), device=DEVICE)


def layers_of(bits: int) -> CachedLayers:
    def norm() -> torch.Tensor:
        return torch.randn(WIDTH, device=DEVICE, dtype=torch.bfloat16)

    return CachedLayers(
        [
            LayerParts(
                norm(), norm(), None, None, None,
                entering(product_of(bits, 3 * WIDTH, WIDTH), gated=False),
                leaving(product_of(bits, WIDTH, WIDTH)),
                entering(product_of(bits, 2 * GATED, WIDTH), gated=True),
                leaving(product_of(bits, WIDTH, GATED)),
            )
            for _ in range(LAYERS)
        ],
        LayerShape(HEADS, HEADS, GATED, EPSILON, (WIDTH // HEADS) ** -0.5), range(LAYERS),
        WIDTH // HEADS,
    )  # fmt: skip


def pass_of(layers: CachedLayers, tokens: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs a pass over random states and slots."""
    head = WIDTH // HEADS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    keys, values = ([random(1, HEADS, SLOTS, head) for _ in range(LAYERS)] for _ in range(2))
    x, cosine, sine = random(1, tokens, WIDTH), random(SLOTS, head), random(SLOTS, head)
    lengths = torch.tensor([LENGTH], device=DEVICE)
    status = torch.zeros(1, device=DEVICE, dtype=torch.int32)

    def attention(number: int, query: torch.Tensor) -> torch.Tensor:
        slots = keys[number], values[number]
        return decoder.attention(query, *slots, None, layers.shape.scale, lengths=lengths)

    append = (cosine, sine, None), (keys, values), (status, lengths, None, HEADS)
    return lambda: layers.through(x, attention, append=append)[0]


def measured(run: Callable[[], torch.Tensor]) -> tuple[float, int]:
    """Return milliseconds of a replay and a hash of its output."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    output_bytes = bytes(output.view(torch.uint8).flatten().tolist())
    return begin.elapsed_time(end) / REPLAYS, hash(output_bytes)


def measure() -> None:
    """Print a line of JSON for each number of bits and of tokens."""
    with torch.inference_mode():
        for bits in (4, 16):
            torch.manual_seed(bits)
            layers = layers_of(bits)
            for tokens in (1, 8):
                print(json.dumps([bits, tokens, *measured(pass_of(layers, tokens))]), flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    times: dict[tuple[int, int], dict[str, float]] = {}
    outputs: dict[tuple[int, int], set[int]] = {}
    for switch in ("0", "1") * TURNS:  # in turns, since clocks change
        set_to = {"POLYSPEC_DEPENDENT_LAUNCH": switch, "PYTHONHASHSEED": "0"}
        lines = subprocess.run(
            [sys.executable, __file__, "measure"], env=os.environ | set_to, check=True,
            stdout=subprocess.PIPE, text=True,
        ).stdout.splitlines()  # fmt: skip
        for bits, tokens, milliseconds, output in map(json.loads, lines):
            best = times.setdefault((bits, tokens), {})
            best[switch] = min(milliseconds, best.get(switch, milliseconds))
            outputs.setdefault((bits, tokens), set()).add(output)
    print("| bits | tokens | plain, ms a pass | dependent | outputs |\n|---|---|---|---|---|")
    for (bits, tokens), best in times.items():
        same = "the same" if len(outputs[bits, tokens]) == 1 else "DIFFER"
        print(f"| {bits} | {tokens} | {best['0']:.3f} | {best['1']:.3f} | {same} |")
    return int(any(len(found) > 1 for found in outputs.values()))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(main())
    measure()
