"""The processor this process runs on, and what else decides how fast torch is on it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from . import progress
from ._C import build_info


def name() -> str:
    """Return the processor's model, as the system calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


BUSY = "times may be too long, and ratios uncertain"


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Runnable processes over the last minute; how busy the machine is beside this."""
    return os.getloadavg()[0]


def is_busy(load: float, threads: int, cores: int) -> bool:
    """Return whether others left too few cores for `threads`. Wall times then measure the
    scheduler."""
    return load + threads > cores + 0.5


def load_line(load: float) -> str:
    """Return a load for people, and what it does to times where the machine is busy."""
    threads, available = torch.get_num_threads(), cores()
    line = f"load average {load:.1f} beside {threads} threads on {available} cores"
    if not is_busy(load, threads, available):
        return line
    return f"{line}: {BUSY}; an idle machine, or fewer threads, tell more"


def note_load() -> None:
    """Tell of a busy machine before something is timed."""
    load = load_average()
    if is_busy(load, torch.get_num_threads(), cores()):
        progress.note(load_line(load))


def multiplies_bfloat16() -> bool:
    """Return whether the processor has products of bfloat16 (AVX512-BF16 or AMX) that torch may
    use: without them they take longer than those of float32."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextlib.contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let torch round the factors of float32 products to bfloat16 in the block, if the processor
    multiplies that: half the time. Sums stay float32."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if multiplies_bfloat16():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def instructions() -> str:
    """Return the widest vectors that torch uses, as it calls them, and whether there are matrix
    registers: "AVX512, AMX"."""
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return torch.backends.cpu.get_cpu_capability() + amx


def facts() -> dict[str, object]:
    """Return processor, instruction sets (those found, and those that the environment leaves to
    torch, oneDNN and this package), threads and versions: where one differs, times measured earlier
    mean nothing."""
    tell = getattr(torch.cpu, "get_capabilities", None)  # not in every release
    found = {} if tell is None else tell()
    caps = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "POLYSPEC_CPU_ISA")
    return {
        "processor": name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": sorted(flag for flag, value in found.items() if value is True),
        "environment": {each: os.environ[each] for each in caps if each in os.environ},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "polyspec_ext": build_info()["version"],
    }
