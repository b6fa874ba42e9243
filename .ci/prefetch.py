"""Measure whether bringing weights to L2 while small kernels run pays, with no change to a kernel.

The products and small kernels of llama2-7b's layers, of 4-bit or bfloat16 weights, are captured in
a CUDA graph: as they are, and with a side branch before each small kernel (fork, a kernel that
prefetches the first megabytes of the next product's weights, join). The model in docs/gpu.md says
that .35 to .5 ms of a 4-bit pass hide there. Needs nvcc and a GPU of sm_90.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import polyspec_ext._C  # noqa: F401, registers the operators
from polyspec_ext.quantization import weights as int4

SOURCE = """
#include <cstdint>
#include <cuda_runtime.h>
constexpr int64_t kBytes = 16384;
__global__ void prefetch_kernel(const char* from, int64_t bytes) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kBytes;
  int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kBytes;
  for (; at < bytes; at += step) {
    const unsigned size = static_cast<unsigned>(bytes - at < kBytes ? bytes - at : kBytes);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(size));
  }
}
extern "C" int prefetch(const void* from, int64_t bytes, void* stream) {
  prefetch_kernel<<<4, 32, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const char*>(from), bytes / 16 * 16);
  return static_cast<int>(cudaGetLastError());
}
"""
SHAPES = ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))  # of a layer's products
LAYERS, REPLAYS, ROUNDS = 32, 20, 5
MEGABYTES = (0, 2, 8, 24)  # 0: no side branch


def compiled(folder: str) -> ctypes.CDLL:
    source, library = Path(folder, "prefetch.cu"), Path(folder, "prefetch.so")
    source.write_text(SOURCE)
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-shared", "-Xcompiler=-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def weights_of(bits: int) -> list[torch.Tensor]:
    def random(outputs: int, inputs: int) -> torch.Tensor:
        if bits == 16:
            return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        values = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
        scales = torch.full((outputs, inputs // 128), 0.01, device="cuda")
        return int4.pack(values, scales, torch.zeros_like(scales), 128)

    return [random(*shape) for _ in range(LAYERS) for shape in SHAPES]


def pass_of(
    library: ctypes.CDLL, weights: list[torch.Tensor], bits: int, tokens: int, megabytes: int
) -> Callable[[], None]:
    """Return a replay of a pass over all layers."""
    inputs = {
        width: torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        for width in (4096, 11008)
    }
    side = torch.cuda.Stream()

    def run() -> None:
        main = torch.cuda.current_stream()
        for number, weight in enumerate(weights):
            outputs, width = SHAPES[number % len(SHAPES)]
            if megabytes:
                side.wait_stream(main)  # fork
                most = min(megabytes << 20, weight.numel() * weight.element_size())
                at, stream = ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(side.cuda_stream)
                if library.prefetch(at, ctypes.c_int64(most), stream):
                    raise RuntimeError("the prefetch was not launched")
            x = torch.nn.functional.rms_norm(inputs[width], (width,))  # the small kernels
            if megabytes:
                main.wait_stream(side)  # join
            if bits == 16:
                torch.nn.functional.linear(x, weight)
            else:
                int4.product(x, weight, outputs, 128)

    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm):
        run()
    return graph.replay


def milliseconds(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return
    print(
        "| bits | tokens | megabytes prefetched before a product | ms a pass |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        library = compiled(folder)
        for bits in (4, 16):
            weights = weights_of(bits)
            for tokens in (1, 8):
                replays = {m: pass_of(library, weights, bits, tokens, m) for m in MEGABYTES}
                times: dict[int, list[float]] = {m: [] for m in MEGABYTES}
                for _ in range(ROUNDS):  # in turns, since clocks change
                    for m, replay in replays.items():
                        times[m].append(milliseconds(replay))
                for m in MEGABYTES:
                    print(f"| {bits} | {tokens} | {m} | {statistics.median(times[m]):.3f} |")
            del weights, replays


if __name__ == "__main__":
    main()
