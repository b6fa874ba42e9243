"""The processor of this process, its load, and the settings that decide torch's speed on it."""

from __future__ import annotations

import os
import platform

import torch
import transformers

from . import progress
from ._C import build_info


def name() -> str:
    """Return the system's name of the processor model."""
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
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Return the mean number of runnable processes over the last minute."""
    return os.getloadavg()[0]


def is_busy(load: float, threads: int, cores: int) -> bool:
    """Return whether other processes leave too few cores for `threads`: wall times then measure the
    operating system's scheduler."""
    return load + threads > cores + 0.5


def load_line(load: float) -> str:
    """Return a line about the load, with a warning about times if the machine is busy."""
    threads, available = torch.get_num_threads(), cores()
    line = f"load average {load:.1f} beside {threads} threads on {available} cores"
    if not is_busy(load, threads, available):
        return line
    return f"{line}: {BUSY}; an idle machine, or fewer threads, tell more"


def note_load() -> None:
    """Print a note if the machine is busy, before a measurement."""
    load = load_average()
    if is_busy(load, torch.get_num_threads(), cores()):
        progress.note(load_line(load))


def instructions() -> str:
    """Return torch's name of the widest vectors that it uses, and of matrix registers if there are
    any: "AVX512, AMX"."""
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return torch.backends.cpu.get_cpu_capability() + amx


def facts() -> dict[str, object]:
    """Return processor, instruction sets (detected, and limits of the environment for torch, oneDNN
    and this package), threads and versions: earlier times are valid only if all of them are equal.
    """
    tell = getattr(torch.cpu, "get_capabilities", None)  # not in every release
    flags = {} if tell is None else tell()
    caps = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "POLYSPEC_CPU_ISA")
    return {
        "processor": name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": sorted(flag for flag, value in flags.items() if value is True),
        "environment": {key: os.environ[key] for key in caps if key in os.environ},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "polyspec_ext": build_info()["version"],
    }
