"""Describe processor, versions, commit and load of a benchmark."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from polyspec_ext import _C, ops, processor
from polyspec_ext.errors import PolyspecError


def describe(device: str) -> dict[str, Any]:
    """Describe the machine of the numbers. No path is named."""
    cpu = processor.name()
    return {
        "device_name": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cpu": cpu,
        "cores": processor.cores(),
        "threads": torch.get_num_threads(),
        "cpu_capability": processor.instructions(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "polyspec": _C.build_info(),
        "commit": commit(),
    }


def header(kind: str, schema: int, device: str) -> dict[str, Any]:
    """Return the head of the JSON report of ``benchmarks <kind>``, made before it measures:
    `schema` is the number of its form, the date is that of UTC."""
    return {
        "schema": schema,
        "command": f"bench {kind}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "machine": describe(device),
        "load": {"before": processor.load_average()},
    }


def require_device(device: str) -> None:
    """PolyspecError where the operators do not run on it here."""
    if device == "cuda" and not ops.has_cuda():
        raise PolyspecError("--device cuda: no CUDA device, or a build without CUDA kernels")


def commit() -> str | None:
    """Abbreviated commit of the checkout that this file is in, "+" for local changes; None
    outside a checkout."""
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != package.parent:
            return None  # installed into somebody else's checkout
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return None


def conditions(report: Mapping[str, Any]) -> str:
    """Describe threads, torch and load of a report."""
    where, load = report["machine"], report["load"]["before"]
    text = f"{where['threads']} threads of {where['cores']} cores, torch {where['torch']}, "
    text += f"load average {load:.1f} before"
    busy = processor.is_busy(load, where["threads"], where["cores"])
    return f"{text} (busy: {processor.BUSY})" if busy and report.get("device") != "cuda" else text


# A copy reads, writes and, in most caches, reads first what it overwrites: so much more than its
# bandwidth reading alone may reach.
_READING = 1.5


def contradiction(shares: Iterable[float | None]) -> list[str]:
    """Return what is to be said where memory was read at so many times the copy bandwidth."""
    most = max((share for share in shares if share is not None), default=0.0)
    if most <= _READING:
        return []
    return [
        f"Up to {100 * most:,.0f} % of the copy bandwidth is more than memory gives: what is read "
        "stays in caches, or something else had the processor while the copy was timed."
    ]
