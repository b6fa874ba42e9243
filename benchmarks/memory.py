"""Whether a published model's shape, its 4-bit copy and an EAGLE-2 head have room here."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.published_shapes import Shape

_GROUP = 128  # inputs of a row of the copy that share a scale
_CONTEXT = 2048  # tokens in the caches
_GB = 1e-9


def memory_needed(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Bytes by what they are for: on the device, and "on the host" (in CUDA's case the 4-bit
    numbers pass through it)."""
    size, matrices = dtype.itemsize, shape.layers * shape.layer_weights
    ends = 2 * shape.vocab * shape.hidden
    head = shape.layer_weights + 2 * shape.hidden**2
    largest = shape.hidden * max(2 * shape.inner, 3 * shape.hidden)
    found = {
        "target": size * float(matrices + ends),
        "W4 copy": matrices * (0.5 + 4 / _GROUP) * 1.1,
        "EAGLE-2 head": size * float(head),
        "caches": 4.0 * shape.layers * shape.kv_heads * shape.head_dim * size * _CONTEXT,
        "quantisation": 24.0 * largest,
        "operators": 2.0 * timing.MIB * (1024 if device == "cuda" else 128) + 5e8,
    }
    if device == "cpu":
        found["packed weights"] = size * float(matrices + ends // 2 + head)
        found["4-bit numbers"] = 1.2 * matrices
    else:
        found["on the host"] = 1.2 * matrices + 4.0 * largest
    return found


def memory_free(device: str) -> float:
    """Bytes that can be had on the device ("cpu": the host)."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    place = Path("/proc/meminfo")
    if place.is_file():
        for line in place.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float("inf")  # not told


def require_memory(shape: Shape, dtype: torch.dtype, device: str, hint: str = "") -> None:
    """
    Args:
        hint: what to do about it, behind the message.

    Raises:
        ValueError: there is not enough; names what is needed for what, and what there is.
    """
    needed = memory_needed(shape, dtype, device)
    host = needed.pop("on the host", 0.0)
    for place, parts in ((device, needed), ("cpu", {"4-bit numbers": host})):
        total, there = sum(parts.values()), memory_free(place)
        if total > there:
            words = ", ".join(f"{name} {_GB * size:.1f}" for name, size in parts.items())
            raise ValueError(
                f"memory: expected {_GB * total:.1f} GB free on {place} for {shape.layers} layers "
                f"of {shape.name} ({words}), given {_GB * there:.1f} GB{hint}"
            )
